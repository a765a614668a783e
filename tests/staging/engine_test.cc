#include "staging/engine.h"

#include <gtest/gtest.h>

#include <chrono>
#include <type_traits>

namespace herring::staging {
namespace {

using namespace std::chrono_literals;

constexpr OperationId kFirst{1}, kSecond{2};
const Instant kStart{1s};
const Instant kLate = kStart + 1h;

/// The only action of that kind, which must be there.
template <class Kind>
std::vector<Kind> take(Actions& actions) {
  std::vector<Kind> found;
  for (const Action& each : actions) {
    if (const auto* const kind = std::get_if<Kind>(&each)) found.push_back(*kind);
  }
  return found;
}

class StagingEngine : public ::testing::Test {
 protected:
  Engine make(std::uint32_t slots) { return Engine({.slots = slots, .part_bytes = 100, .drain = 10s}); }

  /// One part all the way.
  void pass(Engine& engine, OperationId id, std::uint32_t part) {
    engine.on_copied_out(kStart, id, part, Status::ok(), actions_);
    engine.on_reduced(kStart, id, part, Status::ok(), actions_);
    engine.on_back_submitted(kStart, id, part, Status::ok(), actions_);
    engine.on_copied_back(kStart, id, part, Status::ok(), actions_);
  }
  template <class Kind>
  std::size_t count() {
    return take<Kind>(actions_).size();
  }

  Actions actions_;
};

TEST_F(StagingEngine, CutsPartsAlikeAndInOrder) {
  Engine engine = make(2);
  ASSERT_TRUE(engine.submit(kStart, kFirst, 250, kLate, Until::kDone, actions_).is_ok());
  auto out = take<CopyOut>(actions_);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0].part, (Part{kFirst, 0, 0, 100, SlotId{0}}));
  EXPECT_EQ(out[1].part, (Part{kFirst, 1, 100, 100, SlotId{1}}));
  actions_.clear();
  pass(engine, kFirst, 1);
  out = take<CopyOut>(actions_);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].part, (Part{kFirst, 2, 200, 50, SlotId{1}})) << "the slot that came back";
  pass(engine, kFirst, 0);
  EXPECT_EQ(count<Complete>(), 0u);
  pass(engine, kFirst, 2);
  ASSERT_EQ(count<Complete>(), 1u);
  EXPECT_TRUE(take<Complete>(actions_)[0].status.is_ok());
  EXPECT_EQ(count<Release>(), 1u);
  EXPECT_EQ(engine.operations(), 0u);
  EXPECT_EQ(engine.free_slots(), 2u);
}

TEST_F(StagingEngine, NothingIsStillOnePart) {
  Engine engine = make(1);
  ASSERT_TRUE(engine.submit(kStart, kFirst, 0, kLate, Until::kDone, actions_).is_ok());
  EXPECT_EQ(take<CopyOut>(actions_).at(0).part, (Part{kFirst, 0, 0, 0, SlotId{0}}));
  pass(engine, kFirst, 0);
  EXPECT_EQ(count<Release>(), 1u);
}

TEST_F(StagingEngine, CompletesOnceTheLastCopyBackIsInItsStream) {
  Engine engine = make(1);
  ASSERT_TRUE(engine.submit(kStart, kFirst, 100, kLate, Until::kSubmitted, actions_).is_ok());
  engine.on_copied_out(kStart, kFirst, 0, Status::ok(), actions_);
  engine.on_reduced(kStart, kFirst, 0, Status::ok(), actions_);
  EXPECT_EQ(count<Complete>(), 0u);
  engine.on_back_submitted(kStart, kFirst, 0, Status::ok(), actions_);
  EXPECT_EQ(count<Complete>(), 1u);
  EXPECT_EQ(count<Release>(), 0u) << "the copy still writes to the operation's memory";
  EXPECT_EQ(engine.free_slots(), 0u) << "and reads the slot";
  engine.on_copied_back(kStart, kFirst, 0, Status::ok(), actions_);
  EXPECT_EQ(count<Release>(), 1u);
}

TEST_F(StagingEngine, ATimeOutDoesNotFreeTheSlotOfACopyInFlight) {
  for (const Until until : {Until::kSubmitted, Until::kDone}) {
    actions_.clear();
    Engine engine = make(1);
    ASSERT_TRUE(engine.submit(kStart, kFirst, 100, kStart + 1s, until, actions_).is_ok());
    EXPECT_EQ(engine.next_deadline(), kStart + 1s);
    engine.advance(kStart + 1s, actions_);
    EXPECT_EQ(engine.free_slots(), 0u);
    // Who has a stream of its own is told at once; a plain caller frees its memory at the end, so it waits for the
    // copy.
    EXPECT_EQ(count<Complete>(), until == Until::kSubmitted ? 1u : 0u);
    EXPECT_EQ(count<Release>(), 0u);
    ASSERT_TRUE(engine.submit(kStart + 1s, kSecond, 100, kLate, until, actions_).is_ok());
    EXPECT_NE(take<CopyOut>(actions_).back().part.slot, SlotId{0}) << "the copy in flight still writes there";
    engine.on_copied_out(kStart + 2s, kFirst, 0, Status::ok(), actions_);
    ASSERT_EQ(count<Complete>(), 1u);
    EXPECT_EQ(take<Complete>(actions_)[0].status.code(), Code::kTimeout);
    EXPECT_NE(take<Complete>(actions_)[0].status.message().find("1 copies in flight"), std::string::npos);
    EXPECT_EQ(count<Release>(), 1u);
    EXPECT_EQ(count<Reduce>(), 0u);
  }
}

TEST_F(StagingEngine, ADeviceThatHangsIsSaidAfterTheDrain) {
  Engine engine = make(1);
  ASSERT_TRUE(engine.submit(kStart, kFirst, 100, kStart + 1s, Until::kDone, actions_).is_ok());
  engine.advance(kStart + 1s, actions_);
  EXPECT_EQ(engine.next_deadline(), kStart + 11s);
  engine.advance(kStart + 11s, actions_);
  ASSERT_EQ(count<Complete>(), 1u);
  EXPECT_NE(take<Complete>(actions_)[0].status.message().find("the device hangs"), std::string::npos);
  EXPECT_EQ(count<Release>(), 0u);
  EXPECT_EQ(engine.next_deadline(), Instant::max());
  // It did not hang after all.
  engine.on_copied_out(kStart + 60s, kFirst, 0, Status::ok(), actions_);
  EXPECT_EQ(count<Complete>(), 1u);
  EXPECT_EQ(count<Release>(), 1u);
  EXPECT_EQ(engine.free_slots(), 1u);
}

TEST_F(StagingEngine, CancellationWaitsForTheReductionToLetGoOfTheSlot) {
  Engine engine = make(1);
  ASSERT_TRUE(engine.submit(kStart, kFirst, 300, kLate, Until::kDone, actions_).is_ok());
  engine.on_copied_out(kStart, kFirst, 0, Status::ok(), actions_);
  engine.cancel(kStart, kFirst, {Code::kCancelled, "not wanted"}, actions_);
  ASSERT_EQ(count<Abandon>(), 1u);
  EXPECT_EQ(count<Complete>(), 1u) << "no copy is in flight: its device memory is free";
  EXPECT_EQ(engine.free_slots(), 0u);
  engine.on_reduced(kStart, kFirst, 0, Status::ok(), actions_);
  EXPECT_EQ(count<CopyBack>(), 0u);
  EXPECT_EQ(count<Release>(), 1u);
  EXPECT_EQ(engine.free_slots(), 1u);
  EXPECT_EQ(count<CopyOut>(), 1u) << "the other parts never start";
}

TEST_F(StagingEngine, OneWithoutASlotGetsOneOfItsOwn) {
  // Another rank may have submitted them in the other order: each would hold what the other waits for.
  Engine engine = make(2);
  ASSERT_TRUE(engine.submit(kStart, kFirst, 1000, kLate, Until::kDone, actions_).is_ok());
  ASSERT_TRUE(engine.submit(kStart, kSecond, 1000, kLate, Until::kDone, actions_).is_ok());
  ASSERT_EQ(count<Grow>(), 1u);
  EXPECT_EQ(take<Grow>(actions_)[0].slot, SlotId{2});
  EXPECT_EQ(take<CopyOut>(actions_).back().part, (Part{kSecond, 0, 0, 100, SlotId{2}}));
  actions_.clear();
  pass(engine, kSecond, 0);
  EXPECT_EQ(take<CopyOut>(actions_).at(0).part, (Part{kSecond, 1, 100, 100, SlotId{2}})) << "and keeps it";
  EXPECT_EQ(count<Grow>(), 0u);
}

TEST_F(StagingEngine, ALostDeviceEndsAllAndKeepsItsSlotsOutOfUse) {
  Engine engine = make(3);
  ASSERT_TRUE(engine.submit(kStart, kFirst, 200, kLate, Until::kDone, actions_).is_ok());
  ASSERT_TRUE(engine.submit(kStart, kSecond, 100, kLate, Until::kSubmitted, actions_).is_ok());
  engine.on_copied_out(kStart, kFirst, 0, Status::ok(), actions_);
  engine.lose_device(kStart, {Code::kTransport, "fell off the bus"}, actions_);
  const auto ends = take<Complete>(actions_);
  ASSERT_EQ(ends.size(), 2u);
  for (const Complete& end : ends) EXPECT_EQ(end.status.message(), "fell off the bus");
  EXPECT_EQ(engine.lost_slots(), 2u);
  engine.on_reduced(kStart, kFirst, 0, Status::ok(), actions_);
  EXPECT_EQ(count<CopyBack>(), 0u);
  EXPECT_EQ(count<Release>(), 0u);
  EXPECT_EQ(engine.operations(), 0u);
  EXPECT_EQ(engine.submit(kStart, OperationId{3}, 1, kLate, Until::kDone, actions_).message(), "fell off the bus");
}

TEST_F(StagingEngine, BoundsAndBadInputAreStatuses) {
  EXPECT_THROW(Engine({.slots = 0}), Error);
  EXPECT_THROW(Engine({.part_bytes = 0}), Error);
  Engine engine({.slots = 1, .part_bytes = 100, .most_operations = 1});
  EXPECT_EQ(engine.submit(kStart, kFirst, 1, kStart, Until::kDone, actions_).code(), Code::kInvalidArgument);
  ASSERT_TRUE(engine.submit(kStart, kFirst, 1, kLate, Until::kDone, actions_).is_ok());
  EXPECT_EQ(engine.submit(kStart, kFirst, 1, kLate, Until::kDone, actions_).code(), Code::kInvalidArgument);
  EXPECT_TRUE(engine.submit(kStart, kSecond, 1, kLate, Until::kDone, actions_).is_again());
}

TEST_F(StagingEngine, AnswersThatNobodyWaitsForChangeNothing) {
  Engine engine = make(1);
  ASSERT_TRUE(engine.submit(kStart, kFirst, 100, kLate, Until::kDone, actions_).is_ok());
  actions_.clear();
  engine.on_reduced(kStart, kFirst, 0, Status::ok(), actions_);
  engine.on_copied_back(kStart, kFirst, 0, Status::ok(), actions_);
  engine.on_back_submitted(kStart, kFirst, 0, Status::ok(), actions_);
  engine.on_copied_out(kStart, kFirst, 7, Status::ok(), actions_);
  engine.on_copied_out(kStart, kSecond, 0, Status::ok(), actions_);
  engine.cancel(kStart, kSecond, {Code::kCancelled, "x"}, actions_);
  EXPECT_TRUE(actions_.empty());
  pass(engine, kFirst, 0);
  pass(engine, kFirst, 0);
  EXPECT_EQ(count<Complete>(), 1u);
  EXPECT_EQ(count<Release>(), 1u);
}

}  // namespace
}  // namespace herring::staging
