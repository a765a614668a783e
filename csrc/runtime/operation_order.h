#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/operation.h"
#include "core/status.h"
#include "runtime/communicator.h"
#include "runtime/memory_in_use.h"

namespace herring::runtime {

/// An operation's place among those that are pending. Kept by OperationOrder.
struct OrderedCall {
  OpDescriptor descriptor;
  std::string name;
  OpKey key;              ///< By its name or the caller's number. With failover: not the one that it has on the wire.
  bool is_keyed = false;  ///< It has one.
  bool is_named = false;  ///< Its order may differ between ranks.
  bool has_number = false;
  bool is_lent = false;              ///< Its memory may be lent as tensors', by its caller.
  std::span<const std::byte> reads;  ///< But what it writes as well.
  std::span<const std::byte> writes;
  GroupId group;
  const Work* work = nullptr;  ///< Of it; for waiting_for().
  std::uint64_t use = 0;       ///< So many of its name, or without one, came before it in its group.

  static constexpr std::size_t kNowhere = ~std::size_t{0};
  std::size_t place = kNowhere;  ///< Among all that are in.
  std::size_t waits_for = 0;     ///< So many others have to end before it begins.
  std::vector<std::shared_ptr<OrderedCall>> followers;
};

/// Which pending operation waits for which (docs/adr/0012-order-of-pending-operations.md): uses of one name for the
/// use before, and operations in call order for earlier ones that share memory with them, where one of the two writes
/// it. Where their order may differ between ranks (names, messages) such a call is refused. Safe from any thread.
class OperationOrder final : public std::enable_shared_from_this<OperationOrder> {
 public:
  /// What a request asks for, of the group's rank `index`.
  static OrderedCall call_of(const Request& request, std::uint32_t index);

  /// Nothing is pending: check() would find nothing.
  bool is_empty() const { return entered_.load(std::memory_order_acquire) == 0; }

  /// Ok: enter() may follow. Else why it is refused; then it counts for nothing, as with any other bad argument.
  Status check(const OrderedCall& call) const;
  /// It may begin once its `waits_for` is 0.
  void enter(const std::shared_ptr<OrderedCall>& call);
  /// It has ended. True where one of those that waited for it may begin now.
  bool leave(OrderedCall& call);
  enum class Borrower : std::uint8_t { kMessage, kTensor };  ///< Of worker to worker; that waits for its bucket.
  /// The call with this work, by its group, name and use; null where it is not pending.
  std::shared_ptr<const OrderedCall> waiting_for(const Work* work) const;

  /// Ok: what somebody borrows who is no operation here is in use until the last copy of `lease` goes. `name`: of the
  /// tensor that is reduced; of what kind the message is.
  Status lend(Borrower borrower, std::string_view name, std::span<const std::byte> reads,
              std::span<const std::byte> writes, std::shared_ptr<void>& lease);

 private:
  bool is_behind(const OrderedCall& call, const OrderedCall& other) const;

  std::atomic<std::size_t> entered_{0};  // Operations that are in, and what is lent.
  mutable std::mutex mutex_;             // Guards all below, and what is kept in the calls that are in.
  std::vector<std::shared_ptr<OrderedCall>> pending_;
  MemoryInUse operations_;
  /// Ends with its last owner.
  struct Loan {
    Loan(std::shared_ptr<OperationOrder> lender, Borrower who, std::string_view named, std::span<const std::byte> read,
         std::span<const std::byte> written);
    ~Loan();
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

    const std::shared_ptr<OperationOrder> order;
    const Borrower borrower;
    const std::string name;
    const std::span<const std::byte> reads, writes;
    std::size_t place = OrderedCall::kNowhere;  // In loans_.
  };
  /// Who has borrowed some of these bytes.
  std::string borrower_of(std::span<const std::byte> reads, std::span<const std::byte> writes) const;

  std::array<MemoryInUse, 2> lent_;                 // By borrower.
  std::unordered_map<OpKey, OrderedCall*> by_key_;  // The latest of each.
  std::vector<Loan*> loans_;                        // For what is said where one is in the way.
};

}  // namespace herring::runtime
