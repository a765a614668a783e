#include "memory/domain.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "core/status.h"
#include "memory/fake_nic.h"

namespace herring::memory {
namespace {

struct DomainTest : ::testing::Test {
  explicit DomainTest(IdleLimits limits = {2, 1 << 20}) : domain(std::make_unique<Domain>(limits)) {
    id = domain->add_nic(nic);
  }
  std::span<std::byte> part(std::size_t first, std::size_t bytes) { return std::span(memory).subspan(first, bytes); }
  const Registration* find(std::span<const std::byte> of) const { return domain->find(id, of); }

  std::shared_ptr<FakeNic> nic = std::make_shared<FakeNic>();
  std::unique_ptr<Domain> domain;
  NicId id;
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 16);
};

TEST_F(DomainTest, ABufferIsRegisteredOnceFromItsAllocationToItsEnd) {
  {
    const Buffer buffer = domain->allocate(10'000);
    EXPECT_EQ(buffer.kind(), MemoryKind::kHost);
    ASSERT_EQ(buffer.size(), 10'000u);
    EXPECT_TRUE(buffer.is_registered());
    buffer.bytes()[9'999] = std::byte{1};
    for (int step = 0; step < 3; ++step) {
      const Hold hold = domain->hold(buffer.bytes().subspan(100, 5'000));
      EXPECT_NE(find(buffer.bytes().subspan(100, 5'000)), nullptr);
    }
    EXPECT_EQ(nic->registered, 1);
    EXPECT_EQ(nic->live, 1);
  }
  EXPECT_EQ(nic->live, 0);
}

TEST_F(DomainTest, OneRegistrationPerCard) {
  auto other = std::make_shared<FakeNic>();
  const NicId second = domain->add_nic(other);
  const Buffer buffer = domain->allocate(4096);
  EXPECT_EQ(nic->registered, 1);
  EXPECT_EQ(other->registered, 1);
  EXPECT_NE(domain->find(id, buffer.bytes()), domain->find(second, buffer.bytes()));
}

TEST_F(DomainTest, WithoutCardsNothingIsHeld) {
  Domain plain;
  EXPECT_FALSE(plain.needs_registration());
  const Buffer buffer = plain.allocate(4096);
  EXPECT_FALSE(buffer.is_registered());
  EXPECT_FALSE(plain.hold(part(0, 100)));
  EXPECT_EQ(plain.stats().registered, 0u);
}

TEST_F(DomainTest, LentMemoryIsRegisteredWhileSomebodyHoldsItAndNoLonger) {
  // A user may free a tensor after its operation, and another may get its address: an old registration would have the
  // card read and write pages that are nobody's.
  std::optional<Hold> first = domain->hold(part(0, 1000));
  std::optional<Hold> second = domain->hold(part(200, 100));
  EXPECT_EQ(nic->registered, 1);
  first.reset();
  EXPECT_NE(find(part(250, 10)), nullptr);
  second.reset();
  EXPECT_EQ(find(part(250, 10)), nullptr);
  EXPECT_EQ(nic->live, 0);
  const Hold again = domain->hold(part(0, 1000));
  EXPECT_EQ(nic->registered, 2);
}

TEST_F(DomainTest, APostKeepsTheRegistrationThatItUses) {
  // Two tensors that share bytes: the post of one may go by the registration of the other, which ends first.
  std::optional<Hold> one = domain->hold(part(0, 1000));
  std::optional<Hold> other = domain->hold(part(0, 2000));
  EXPECT_EQ(nic->live, 2);
  Hold posted = domain->borrow(part(100, 100));
  ASSERT_NE(posted.registration(id), nullptr);
  one.reset();
  other.reset();
  EXPECT_EQ(nic->live, 1) << "the card still uses it";
  posted.reset();
  EXPECT_EQ(nic->live, 0);
  EXPECT_FALSE(domain->borrow(part(3000, 10)));
}

TEST_F(DomainTest, WhatItsOwnerInvalidatesIsUsedAgainUntilThen) {
  for (int step = 0; step < 5; ++step) {
    const Hold hold = domain->hold(part(0, 1000), MemoryKind::kShared, Reuse::kUntilInvalidated);
  }
  EXPECT_EQ(nic->registered, 1);
  EXPECT_EQ(domain->stats().idle_regions, 1u);
  domain->invalidate(part(999, 5));
  EXPECT_EQ(nic->live, 0);
  const Hold hold = domain->hold(part(0, 1000), MemoryKind::kShared, Reuse::kUntilInvalidated);
  EXPECT_EQ(nic->registered, 2);
}

TEST_F(DomainTest, InvalidMemoryThatIsHeldGoesWithItsLastHold) {
  std::optional<Hold> old = domain->hold(part(0, 1000), MemoryKind::kShared, Reuse::kUntilInvalidated);
  const Registration* const before = find(part(0, 1000));
  domain->invalidate(part(0, 1));
  EXPECT_EQ(find(part(0, 1000)), before);  // A post that waits for room is made with it.
  const Hold fresh = domain->hold(part(0, 1000), MemoryKind::kShared, Reuse::kUntilInvalidated);
  EXPECT_NE(find(part(0, 1000)), before);
  EXPECT_EQ(nic->live, 2);
  old.reset();
  EXPECT_EQ(nic->live, 1);
}

TEST_F(DomainTest, IdleRegistrationsAreBoundedByCountAndTheOldestGoFirst) {
  for (std::size_t i = 0; i < 3; ++i) {
    const Hold hold = domain->hold(part(i * 1000, 1000), MemoryKind::kShared, Reuse::kUntilInvalidated);
  }
  EXPECT_EQ(nic->live, 2);
  EXPECT_EQ(find(part(0, 1000)), nullptr);
  EXPECT_NE(find(part(1000, 1000)), nullptr);
  EXPECT_EQ(domain->stats().evicted, 1u);
}

struct SmallDomainTest : DomainTest {
  SmallDomainTest() : DomainTest({100, 2500}) {}
};

TEST_F(SmallDomainTest, IdleRegistrationsAreBoundedByBytes) {
  std::vector<Hold> held;
  for (std::size_t i = 0; i < 4; ++i) {
    held.push_back(domain->hold(part(i * 1000, 1000), MemoryKind::kShared, Reuse::kUntilInvalidated));
  }
  EXPECT_EQ(nic->live, 4);  // What is in use is not bounded here.
  held.clear();
  EXPECT_EQ(nic->live, 2);
  EXPECT_EQ(domain->stats().idle_bytes, 2000u);
}

TEST_F(DomainTest, WhatOutlivesItsMemoryIsSharedWithNobody) {
  Hold old = domain->hold(part(0, 1000));
  const Registration* const before = find(part(0, 1000));
  old.outlive_memory();
  EXPECT_EQ(find(part(0, 1000)), before);
  const Hold fresh = domain->hold(part(0, 1000));
  EXPECT_EQ(nic->registered, 2);
  EXPECT_NE(find(part(0, 1000)), before);
}

TEST_F(DomainTest, ABufferThatGoesTakesNobodyWithIt) {
  std::optional<Buffer> buffer = domain->adopt(part(0, 1000), MemoryKind::kHost, nullptr);
  Hold old = domain->hold(part(0, 1000));
  old.outlive_memory();
  EXPECT_EQ(nic->registered, 1);
  {
    const Hold other = domain->hold(part(0, 1000));  // The buffer is there: its registration is good.
    EXPECT_EQ(nic->registered, 1);
  }
  buffer.reset();
  EXPECT_EQ(nic->live, 1);
  const Hold fresh = domain->hold(part(0, 1000));  // Memory that came to the same place.
  EXPECT_EQ(nic->registered, 2);
}

TEST_F(DomainTest, ABufferMayOutliveTheDomain) {
  auto freed = std::make_shared<bool>(false);
  Buffer buffer = domain->adopt(part(0, 1000), MemoryKind::kShared, {freed.get(), [freed](void*) { *freed = true; }});
  Hold hold = domain->hold(part(5000, 10));
  nic->on_release = [&] { EXPECT_FALSE(*freed); };
  domain.reset();
  EXPECT_EQ(nic->live, 0);
  EXPECT_EQ(nic.use_count(), 1);
  hold.reset();
  buffer = Buffer();
  EXPECT_TRUE(*freed);
}

TEST_F(DomainTest, MemoryGoesAfterItsRegistration) {
  auto freed = std::make_shared<bool>(false);
  nic->on_release = [&] { EXPECT_FALSE(*freed); };
  {
    const Buffer buffer =
        domain->adopt(part(0, 1000), MemoryKind::kHost, {freed.get(), [freed](void*) { *freed = true; }});
  }
  EXPECT_TRUE(*freed);
}

TEST_F(DomainTest, ACardMayNotTakeEveryKind) {
  auto direct = std::make_shared<FakeNic>(true);
  const NicId second = domain->add_nic(direct);
  const Buffer buffer = domain->adopt(part(0, 1000), MemoryKind::kDevice, nullptr);
  EXPECT_EQ(nic->registered, 0);
  EXPECT_EQ(direct->registered, 1);
  EXPECT_EQ(domain->find(id, buffer.bytes()), nullptr);
  EXPECT_NE(domain->find(second, buffer.bytes()), nullptr);
}

TEST_F(DomainTest, ARefusalLeavesNothingBehind) {
  auto other = std::make_shared<FakeNic>();
  static_cast<void>(domain->add_nic(other));
  other->on_register = [](auto, auto) { throw Error(Code::kTransport, "no room"); };
  EXPECT_THROW(static_cast<void>(domain->hold(part(0, 1000))), Error);
  EXPECT_THROW(static_cast<void>(domain->allocate(1000)), Error);
  EXPECT_EQ(nic->live, 0);
  EXPECT_EQ(domain->stats().regions, 0u);
}

TEST_F(DomainTest, CardsComeBeforeMemory) {
  const Hold hold = domain->hold(part(0, 10));
  EXPECT_THROW(domain->add_nic(std::make_shared<FakeNic>()), Error);
}

TEST_F(DomainTest, AForkedChildTakesNothingFromTheCard) {
  // A data loader's process that drops a tensor, while the card works on it for the parent.
  Buffer buffer = domain->allocate(1000);
  nic->on_release = [] { _exit(1); };
  const pid_t child = fork();
  if (child == 0) {
    buffer = Buffer();
    domain->invalidate(memory);
    { const Hold hold = domain->hold(part(0, 10)); }
    domain.reset();
    _exit(0);
  }
  nic->on_release = {};
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(DomainTest, ManyThreadsHoldFindAndInvalidate) {
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 2000; ++i) {
      const std::size_t first = random() % 60'000;
      const std::span<std::byte> some = part(first, 1 + random() % 5000);
      const Reuse reuse = random() % 2 == 0 ? Reuse::kNever : Reuse::kUntilInvalidated;
      const Hold hold = domain->hold(some, MemoryKind::kHost, reuse);
      ASSERT_NE(find(some), nullptr);
      if (random() % 8 == 0) domain->invalidate(part(random() % 60'000, 4000));
      ASSERT_NE(find(some), nullptr);
    }
  };
  std::array<std::thread, 3> threads;
  for (unsigned i = 0; i < threads.size(); ++i) threads[i] = std::thread(work, i);
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(nic->live, 2);
  domain->invalidate(memory);
  EXPECT_EQ(nic->live, 0);
  const DomainStats stats = domain->stats();
  EXPECT_EQ(stats.bytes, 0u);
  EXPECT_EQ(stats.idle_bytes, 0u);
  EXPECT_EQ(stats.regions, 0u);
}

}  // namespace
}  // namespace herring::memory
