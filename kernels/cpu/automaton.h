// The suffix automaton of a growing sequence; kernels/reference/automaton.py says what it is for. Independent of
// Python.
//
// A state holds its first transition. The others, which few states have, lie in a hash table by state and token, as
// the initial state may have one for each token; they are also chained by state, for the copy that `split` makes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sluice {

class Automaton {
 public:
  int64_t num_tokens() const { return num_tokens_; }
  int64_t match_len() const { return match_len_; }
  int64_t match_end() const { return match_end_; }

  void append(int32_t token) {
    ++num_tokens_;
    const int32_t added = add({num_tokens_, NONE, num_tokens_, NONE, NONE, NONE});
    int32_t at = last_, target = NONE;
    while (at != NONE && (target = next(at, token)) == NONE) {
      lead(at, token, added);
      at = states_[at].link;
    }
    int32_t link = 0;
    if (at != NONE) link = states_[target].length == states_[at].length + 1 ? target : split(at, token, target);
    states_[added].link = link;
    last_ = added;
    match_len_ = states_[link].length;
    match_end_ = states_[link].end;
    states_[link].end = link ? num_tokens_ : 0;
  }

 private:
  static constexpr int32_t NONE = -1;

  struct State {
    int32_t length;         // of the state's longest string
    int32_t link;           // suffix link
    int32_t end;            // position behind an occurrence
    int32_t token, target;  // the first transition
    int32_t further;        // index of the last added of the other transitions
  };

  struct Transition {
    int32_t state, token, target;
    int32_t further;  // index of the transition of the same state that was added before
  };

  int32_t add(const State& state) {
    states_.push_back(state);
    return static_cast<int32_t>(states_.size()) - 1;
  }

  // Moves the shorter strings of `target`, which now occur at one position more, to a state of their own.
  int32_t split(int32_t at, int32_t token, int32_t target) {
    State copy = states_[target];
    copy.length = states_[at].length + 1;
    copy.further = NONE;
    const int32_t clone = add(copy);
    for (int32_t i = states_[target].further; i != NONE; i = further_[i].further) {
      const Transition one = further_[i];  // a copy: the next line may reallocate the vector
      lead(clone, one.token, one.target);
    }
    states_[target].link = clone;
    for (; at != NONE && next(at, token) == target; at = states_[at].link) lead(at, token, clone);
    return clone;
  }

  int32_t next(int32_t state, int32_t token) const {
    const State& one = states_[state];
    if (one.token == token) return one.target;
    if (one.further == NONE) return NONE;
    const int32_t found = places_[place(state, token)];
    return found == NONE ? NONE : further_[found].target;
  }

  void lead(int32_t state, int32_t token, int32_t target) {
    State& one = states_[state];
    if (one.token == NONE || one.token == token) {
      one.token = token;
      one.target = target;
      return;
    }
    const size_t at = place(state, token);
    if (places_[at] != NONE) {
      further_[places_[at]].target = target;
      return;
    }
    places_[at] = static_cast<int32_t>(further_.size());
    further_.push_back({state, token, target, one.further});
    one.further = places_[at];
    if (2 * further_.size() > places_.size()) widen();
  }

  // Returns the index of a transition in the hash table, or the free index where it would be.
  size_t place(int32_t state, int32_t token) const {
    const uint64_t key = static_cast<uint64_t>(state) << 32 | static_cast<uint32_t>(token);
    const size_t mask = places_.size() - 1;
    size_t at = (key * 0x9E3779B97F4A7C15u) >> 32 & mask;
    while (places_[at] != NONE && !(further_[places_[at]].state == state && further_[places_[at]].token == token)) {
      at = (at + 1) & mask;
    }
    return at;
  }

  void widen() {
    places_.assign(2 * places_.size(), NONE);
    for (size_t i = 0; i < further_.size(); ++i) {
      places_[place(further_[i].state, further_[i].token)] = static_cast<int32_t>(i);
    }
  }

  std::vector<State> states_{{0, NONE, 0, NONE, NONE, NONE}};
  std::vector<Transition> further_;
  std::vector<int32_t> places_ = std::vector<int32_t>(32, NONE);  // hash table of indices; a power of two, half empty
  int32_t last_ = 0;
  int32_t num_tokens_ = 0, match_len_ = 0, match_end_ = 0;
};

}  // namespace sluice
