#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/types.h"

/// Ranks that wait for each other. Pure: what ranks say of themselves goes in, who waits in vain comes out
/// (docs/adr/0018-ranks-that-wait-for-each-other.md).
namespace herring::runtime {

/// Text of a job's end that begins so is the fault of no rank alone: of a mismatch between them.
inline constexpr std::string_view kDeadlockText = "ranks wait for each other: ";

/// An operation that a thread waits for, as all ranks know it. As it travels.
struct AwaitedCall {
  static constexpr std::size_t kText = 104;

  std::uint32_t group = 0;
  std::uint32_t group_use = 0;     ///< As UsedGroup's.
  std::uint64_t name = 0;          ///< name_key(); 0: it has none, and goes by its number in the group.
  std::uint64_t number = 0;        ///< So many of this name, or without one, came before it.
  std::array<char, kText> text{};  ///< For people; ends with a zero.

  void set_text(const std::string& full);
  friend bool operator==(const AwaitedCall& a, const AwaitedCall& b) {
    return a.group == b.group && a.group_use == b.group_use && a.name == b.name && a.number == b.number;
  }
};

/// What a rank says while all of its threads that wait for others have done so for long.
struct WaitingReport {
  static constexpr std::size_t kMostCalls = 4;  ///< Who waits for more says nothing.

  std::uint64_t list = 0;        ///< The DeadlockList that `not_called` is about; 0: none yet.
  std::uint64_t not_called = 0;  ///< A bit for each call of it that this rank should have called, and has not.
  std::uint32_t count = 0;       ///< Of `calls`.
  std::uint32_t unused = 0;
  std::array<AwaitedCall, kMostCalls> calls;
};

/// What rank 0 answers.
struct DeadlockList {
  static constexpr std::size_t kMostCalls = 64;  ///< Who waits for none of these is left out.

  std::uint64_t list = 0;
  std::uint32_t count = 0;
  std::uint32_t unused = 0;
  std::array<AwaitedCall, kMostCalls> calls;
};
static_assert(std::is_trivially_copyable_v<WaitingReport> && std::is_trivially_copyable_v<DeadlockList>);

/// Rank 0's part. A rank waits in vain where each of its waiting threads waits for a call that some rank, which waits
/// in vain too, has not called. Reports of different moments may be put together: of what such ranks wait for,
/// something would have to end first, and for that one of them would have to call what it had not when it could do
/// nothing any more.
class DeadlockJudge final {
 public:
  /// `last_list`: of a judge before this one, whose answers may still come.
  explicit DeadlockJudge(std::uint32_t ranks, std::uint64_t last_list = 0) : entries_(ranks) { list_.list = last_list; }

  /// What that rank says. False where it makes no sense.
  bool take(std::uint32_t rank, const WaitingReport& report, Instant now);
  /// The question for it: a list of what the ranks that are still heard wait for.
  const DeadlockList& list() const { return list_; }
  /// Who has not been heard for so long is forgotten. Then finds who waits in vain.
  void look(Instant now, Duration silence);

  /// Ranks that wait in vain, and for what, for people. Empty: none that is certain.
  const std::vector<std::uint32_t>& stuck() const { return stuck_; }
  const std::string& text() const { return text_; }

 private:
  struct Entry {
    bool is_heard = false;
    Instant last_heard{};
    WaitingReport report;
  };

  bool is_listed(const WaitingReport& report) const;
  void ask();
  void find();
  std::optional<std::size_t> place(const AwaitedCall& call) const;
  void say();

  std::vector<Entry> entries_;
  DeadlockList list_;
  std::vector<std::uint32_t> stuck_;
  std::string text_;
};

}  // namespace herring::runtime
