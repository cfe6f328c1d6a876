#include "sluice/progress.h"

namespace sluice {

bool Progress::detaches() const { return spec.scheduling().on_disconnect() == v1::DISCONNECT_ACTION_DETACH; }

bool Progress::has_begun() const { return accepted && (last_seq > 0 || detaches()); }

bool Progress::stays() const { return accepted && detaches() && !has_all_ids(); }

bool Progress::can_go_on() const { return last_seq == 0 || detaches() || has_all_ids(); }

bool Progress::has_all_ids() const {
  std::size_t num = 0;
  for (const auto& [index, of_output] : ids) num += of_output.size();
  return num == num_tokens;
}

bool Progress::take_delta(const v1::Delta& delta) {
  if (delta.seq() <= last_seq) return false;
  last_seq = delta.seq();
  num_tokens += delta.consumed();
  if (delta.tokens_size() == 0) return true;
  auto& of_output = ids[delta.output_index()];
  for (const v1::Token& token : delta.tokens()) of_output.push_back(token.id());
  return true;
}

v1::GenerationSpec Progress::rest() const {
  v1::GenerationSpec rest;
  if (has_all_ids()) {
    rest = spec;
    rest.clear_credit_window();
    rest.set_model(accepted->model());
    rest.set_revision(accepted->revision());
    const v1::EffectiveParams& params = accepted->params();
    if (params.has_sampling()) *rest.mutable_sampling() = params.sampling();
    if (params.has_stop()) *rest.mutable_stop() = params.stop();
    if (params.has_output()) *rest.mutable_output() = params.output();
    if (params.has_constraint()) *rest.mutable_constraint() = params.constraint();
    if (params.has_cache()) *rest.mutable_cache() = params.cache();
    if (params.has_scheduling()) *rest.mutable_scheduling() = params.scheduling();
    if (params.has_speculation()) *rest.mutable_speculation() = params.speculation();
    // Converse accepts a generation before its max_tokens is known.
    if (spec.sampling().has_max_tokens() && !rest.sampling().has_max_tokens()) {
      rest.mutable_sampling()->set_max_tokens(spec.sampling().max_tokens());
    }
  }
  rest.mutable_resume()->set_generation_id(accepted->generation_id());
  rest.mutable_resume()->set_after_seq(last_seq);
  rest.mutable_resume()->set_adapter_digest(accepted->adapter_digest());
  for (const auto& [index, of_output] : ids) {
    v1::OutputPrefix* prefix = rest.mutable_resume()->add_outputs();
    prefix->set_output_index(index);
    prefix->mutable_token_ids()->Add(of_output.begin(), of_output.end());
  }
  return rest;
}

void Progress::note(const v1::Update& update) {
  const auto changed = [&update](auto& params) {
    if (update.has_max_tokens()) params.mutable_sampling()->set_max_tokens(update.max_tokens());
    if (update.has_priority()) params.mutable_scheduling()->set_priority(update.priority());
    if (update.has_stop()) *params.mutable_stop() = update.stop();
  };
  changed(spec);
  if (accepted) changed(*accepted->mutable_params());
}

}  // namespace sluice
