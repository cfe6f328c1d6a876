// What a client has received of one generation, and the request for the rest of it. No I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "sluice/v1/inference.pb.h"
#include "sluice/v1/types.pb.h"

namespace sluice {

struct Progress {
  explicit Progress(v1::GenerationSpec asked) : spec(std::move(asked)) {}

  v1::GenerationSpec spec;
  std::optional<v1::Accepted> accepted = {};
  std::optional<v1::PromptInfo> prompt_info = {};
  // How each output ended.
  std::map<std::uint32_t, v1::OutputFinished> ends = {};
  // The last message; absent until it has come.
  std::optional<v1::Finished> finished = {};
  // Sequence number of the last delta.
  std::uint64_t last_seq = 0;
  // Tokens received, over all outputs.
  std::size_t num_tokens = 0;
  // Ids of the tokens received, by output; fewer than tokens if token_records is false.
  std::map<std::uint32_t, std::vector<std::uint32_t>> ids = {};

  // Whether the server keeps the generation when its connection is lost.
  bool detaches() const;
  // Whether the generation is continued by ResumeGenerate; otherwise the request is sent again.
  bool has_begun() const;
  // Whether the generation can continue after its connection was lost: with the ids received, from the beginning, or
  // because its server keeps it.
  bool can_go_on() const;
  // Whether only the service that has the generation can go on with it.
  bool stays() const;
  // Returns the spec for ResumeGenerate. If not all ids are known it has no prompt, so that no gateway starts the
  // generation again from the beginning.
  v1::GenerationSpec rest() const;
  // Records an update of parameters, so that a resumption keeps it.
  void note(const v1::Update& update);

  // Records an event of any call. Returns its delta, or nullptr if it has none or the delta was received before.
  template <typename Event>
  const v1::Delta* take(const Event& event) {
    if (event.has_delta()) return take_delta(event.delta()) ? &event.delta() : nullptr;
    if (event.has_accepted()) accepted = event.accepted();
    if (event.has_prompt_info()) prompt_info = event.prompt_info();
    if (event.has_output_finished()) ends.emplace(event.output_finished().output_index(), event.output_finished());
    if (event.has_finished()) finished = event.finished();
    return nullptr;
  }

 private:
  bool take_delta(const v1::Delta& delta);
  bool has_all_ids() const;
};

}  // namespace sluice
