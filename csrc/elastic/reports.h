#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.h"
#include "elastic/message.h"

/// How often workers say what they have, and the rendezvous what all have. Pure: it is told the time.
namespace herring::elastic {

/// The rendezvous says Settled no more often, with so many workers.
Duration settled_pause(std::uint32_t workers);
/// A worker says Completed no more often: nothing is lost where it comes before the next Settled.
Duration report_pause(std::uint32_t workers);

/// What a worker has complete, or will never ask for, and has not told the rendezvous.
class Reports final {
 public:
  void add(const OperationId& id) { waiting_.push_back(id); }
  void clear() { waiting_.clear(); }
  bool empty() const { return waiting_.empty(); }
  std::size_t size() const { return waiting_.size(); }
  /// When it is to be told; Instant::max() where there is nothing to tell. After a pause that is at once.
  Instant due(std::uint32_t workers) const;
  /// All of it, which is told now.
  std::vector<OperationId> take(Instant now);

 private:
  std::vector<OperationId> waiting_;
  Instant told_{};
};

}  // namespace herring::elastic
