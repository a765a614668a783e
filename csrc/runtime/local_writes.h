#pragma once

#include <chrono>
#include <cstddef>
#include <span>

#include "core/store_choice.h"
#include "core/types.h"
#include "intra_node/engine.h"
#include "server/reduce.h"

namespace herring::runtime {

/// Carries out the engine's copies and sums, with the stores that suit who reads the result (StoreChoice). Used by one
/// thread at a time.
class LocalWrites final {
 public:
  explicit LocalWrites(server::Isa isa, StoreChoice choice = {}) : isa_(isa), choice_(choice) {}

  void copy(const intra_node::CopyAction& action);
  void reduce(intra_node::ReduceLocal& action);

  /// write(bool streams) writes `bytes` that ranks on other cores read next.
  template <class Write>
  void for_others(std::size_t bytes, Write write) {
    if (bytes < StoreChoice::kLeastBytes) return write(false);
    const Instant begin = std::chrono::steady_clock::now();
    write(choice_.streams());
    choice_.on_written(bytes, std::chrono::steady_clock::now() - begin);
  }

 private:
  const server::Isa isa_;
  StoreChoice choice_;
};

}  // namespace herring::runtime
