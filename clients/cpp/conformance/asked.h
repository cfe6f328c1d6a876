// The suite's requests and the driver's answers: JSON by way of protobuf's Struct.
#pragma once

#include <google/protobuf/struct.pb.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sluice/sluice.h"

struct Asked {
  std::string call;
  std::string text;
  std::string image;  // path of a picture before the text, or empty
  int repeat = 1;
  std::optional<std::uint32_t> max_tokens;
  std::optional<std::uint64_t> seed;
  std::vector<std::string> choices;
  std::optional<double> timeout_s;
  int count = 1;
  std::optional<std::uint32_t> window;
  std::optional<std::vector<std::uint32_t>> grants;
  int cancel_after = 0;
  int pause_after = 0;
};

struct End {
  std::string text;
  std::vector<std::uint32_t> token_ids;
  std::string finish_reason;
  std::optional<std::uint32_t> completion_tokens;
  int num_deltas = 0;
  int num_empty = 0;
  bool seqs_rise = true;
  int num_broken = 0;
  std::optional<sluice::Failure> error;
};

Asked asked_of(const std::string& line);
std::string told(const End& end);
std::string told_paused(const std::string& generation_id);
