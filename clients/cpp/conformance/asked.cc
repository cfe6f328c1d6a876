#include "asked.h"

#include <google/protobuf/util/json_util.h>

#include <stdexcept>

namespace {

using google::protobuf::Struct;
using google::protobuf::Value;

const Value* found(const Struct& from, const char* name) {
  const auto at = from.fields().find(name);
  return at == from.fields().end() ? nullptr : &at->second;
}

template <typename Number>
void read(const Struct& from, const char* name, Number& into) {
  if (const Value* value = found(from, name)) into = static_cast<Number>(value->number_value());
}

template <typename Number>
void read(const Struct& from, const char* name, std::optional<Number>& into) {
  if (const Value* value = found(from, name)) into = static_cast<Number>(value->number_value());
}

void read(const Struct& from, const char* name, std::string& into) {
  if (const Value* value = found(from, name)) into = value->string_value();
}

void set(Struct& into, const char* name, const std::string& value) {
  (*into.mutable_fields())[name].set_string_value(value);
}

void set(Struct& into, const char* name, double value) { (*into.mutable_fields())[name].set_number_value(value); }

void set(Struct& into, const char* name, Struct value) {
  *(*into.mutable_fields())[name].mutable_struct_value() = std::move(value);
}

google::protobuf::ListValue& list(Struct& into, const char* name) {
  return *(*into.mutable_fields())[name].mutable_list_value();
}

std::string line_of(const char* name, Struct value) {
  Struct whole;
  set(whole, name, std::move(value));
  std::string line;
  if (!google::protobuf::util::MessageToJsonString(whole, &line).ok()) throw std::runtime_error("not JSON");
  return line + "\n";
}

Struct failure(const sluice::Failure& error) {
  Struct made;
  set(made, "code", std::string(sluice::name_of(error.code)));
  set(made, "reason", error.reason);
  set(made, "message", error.message);
  for (const auto& one : error.violations) list(made, "fields").add_values()->set_string_value(one.field);
  const auto after = error.retry_after.value_or(sluice::Duration(0));
  set(made, "retry_after_s", std::chrono::duration<double>(after).count());
  set(made, "generation_id", error.generation_id);
  set(made, "last_seq", static_cast<double>(error.last_seq));
  return made;
}

}  // namespace

Asked asked_of(const std::string& line) {
  Struct from;
  if (!google::protobuf::util::JsonStringToMessage(line, &from).ok()) throw std::runtime_error("no JSON: " + line);
  Asked asked;
  read(from, "call", asked.call);
  read(from, "text", asked.text);
  read(from, "image", asked.image);
  read(from, "repeat", asked.repeat);
  read(from, "max_tokens", asked.max_tokens);
  read(from, "seed", asked.seed);
  read(from, "timeout_s", asked.timeout_s);
  read(from, "count", asked.count);
  read(from, "window", asked.window);
  read(from, "cancel_after", asked.cancel_after);
  read(from, "pause_after", asked.pause_after);
  if (const Value* choices = found(from, "choices")) {
    for (const Value& one : choices->list_value().values()) asked.choices.push_back(one.string_value());
  }
  if (const Value* grants = found(from, "grants")) {
    asked.grants.emplace();
    for (const Value& one : grants->list_value().values()) {
      asked.grants->push_back(static_cast<std::uint32_t>(one.number_value()));
    }
  }
  return asked;
}

std::string told(const End& end) {
  Struct made;
  set(made, "text", end.text);
  auto& ids = list(made, "token_ids");
  for (const std::uint32_t id : end.token_ids) ids.add_values()->set_number_value(id);
  set(made, "finish_reason", end.finish_reason);
  if (end.completion_tokens) {
    set(made, "completion_tokens", *end.completion_tokens);
  } else {
    (*made.mutable_fields())["completion_tokens"].set_null_value({});
  }
  set(made, "num_deltas", end.num_deltas);
  set(made, "num_empty", end.num_empty);
  (*made.mutable_fields())["seqs_rise"].set_bool_value(end.seqs_rise);
  set(made, "num_broken", end.num_broken);
  if (end.error) {
    set(made, "error", failure(*end.error));
  } else {
    (*made.mutable_fields())["error"].set_null_value({});
  }
  return line_of("end", std::move(made));
}

std::string told_paused(const std::string& generation_id) {
  Struct made;
  set(made, "generation_id", generation_id);
  return line_of("paused", std::move(made));
}
