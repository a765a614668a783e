// One rank gives a group up, or leaves: who waits for it there hears at once, and everybody else goes on.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/status.h"
#include "runtime/job.h"
#include "runtime/places.h"

namespace herring::runtime {
namespace {

using namespace testing;

constexpr GroupId kPair{7};
constexpr std::size_t kCount = 200'000;  // Several parts.

Status end_within(double limit_s, const std::shared_ptr<Work>& work) {
  const bool ended = work->wait(in_seconds(limit_s));
  EXPECT_TRUE(ended) << "it still waits after " << limit_s << " s";
  return ended ? work->status() : Status(Code::kInternal, "it still waits");
}

void expect_has(const Status& status, Code code, std::initializer_list<const char*> words) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  for (const char* word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos) << word << " is not in: " << status.to_string();
  }
}

Request in_group(GroupId group, std::span<float> values) {
  Request request = all_reduce(values);
  request.group = group;
  return request;
}

void expect_world_goes_on(Runtime& runtime) {
  std::vector<float> values(kCount, 1.0f);
  finish(runtime.submit(all_reduce(values)));
  EXPECT_EQ(values.front(), static_cast<float>(runtime.size()));
  EXPECT_EQ(values.back(), static_cast<float>(runtime.size()));
}

/// Rank 1 has called nothing; rank 0 waits for it in an operation, in one behind it, and for a message.
void abort_what_others_wait_for(Runtime& runtime) {
  const std::vector<std::uint32_t> pair{0, 1};
  if (runtime.rank() < 2) runtime.add_group(kPair, pair);
  expect_world_goes_on(runtime);
  std::vector<float> values(kCount, 1.0f), message(8);
  if (runtime.rank() == 0) {
    const auto work = runtime.submit(in_group(kPair, values));
    const auto held = runtime.submit(in_group(kPair, values));
    const auto received = runtime.receive({kPair, 1, 3, std::as_writable_bytes(std::span(message))});
    expect_has(end_within(5, work), Code::kCancelled, {"rank 1", "aborted the group", "enough"});
    expect_has(end_within(5, held), Code::kCancelled, {"rank 1", "aborted the group"});
    expect_has(end_within(5, received), Code::kCancelled, {"rank 1", "aborted the group"});
    expect_has(end_within(5, runtime.submit(in_group(kPair, message))), Code::kCancelled,
               {"rank 1", "aborted the group"});
    Status status;
    if (const auto later = runtime.run(in_group(kPair, message), status)) status = end_within(5, later);
    expect_has(status, Code::kCancelled, {"rank 1", "aborted the group"});
    expect_has(end_within(5, runtime.send({kPair, 1, 3, std::as_bytes(std::span(message))})), Code::kCancelled,
               {"rank 1", "aborted the group"});
  } else if (runtime.rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    runtime.abort_group(kPair, "enough");
    expect_has(end_within(1, runtime.submit(in_group(kPair, values))), Code::kCancelled, {"enough"});
    expect_has(end_within(1, runtime.send({kPair, 0, 3, std::as_bytes(std::span(message))})), Code::kCancelled,
               {"enough"});
  }
  expect_world_goes_on(runtime);
}

TEST(GroupAbort, EndsThatGroupAlone) { on_every_place(3, abort_what_others_wait_for); }

/// All are in it when one gives up: it has its memory back, and the others an error or the right sum.
void abort_while_it_moves(Runtime& runtime) {
  const std::vector<std::uint32_t> everybody{0, 1, 2};
  for (std::uint32_t round = 0; round < 6; ++round) {
    const GroupId group{20 + round};
    runtime.add_group(group, everybody);
    std::vector<float> values(10 * kCount, 1.0f);
    expect_world_goes_on(runtime);
    const auto work = runtime.submit(in_group(group, values));
    if (runtime.rank() == round % 3) {
      std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
      runtime.abort_group(group, "enough");
    }
    const Status status = end_within(10, work);
    if (status.is_ok()) {
      EXPECT_EQ(values.front(), 3.0f);
      EXPECT_EQ(values.back(), 3.0f);
    } else if (runtime.rank() != round % 3) {
      EXPECT_NE(status.message().find("rank " + std::to_string(round % 3)), std::string::npos) << status.to_string();
    }
    std::fill(values.begin(), values.end(), 7.0f);
    expect_world_goes_on(runtime);
    EXPECT_EQ(std::count(values.begin(), values.end(), 7.0f), static_cast<std::ptrdiff_t>(values.size()));
    runtime.remove_group(group);
  }
}

TEST(GroupAbort, WhileDataMovesEndsItEverywhere) { on_every_place(3, abort_while_it_moves); }

/// What the others have called there and this rank has not goes on, and so does the group.
void give_up_what_is_pending(Runtime& runtime) {
  const std::vector<std::uint32_t> everybody{0, 1, 2};
  runtime.add_group(kPair, everybody);
  std::vector<float> given_up(kCount, 1.0f), other(kCount, 1.0f), next(kCount, 1.0f);
  const auto named = [](std::vector<float>& values, const char* name) {
    Request request = in_group(kPair, values);
    request.name = name;
    return request;
  };
  if (runtime.rank() == 0) {
    const auto work = runtime.submit(named(given_up, "given up"));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    runtime.give_up_pending(kPair, "enough");
    expect_has(end_within(5, work), Code::kCancelled, {"enough"});
    expect_world_goes_on(runtime);
    finish(runtime.submit(named(other, "other")));
  } else {
    const auto pending = runtime.submit(named(other, "other"));
    if (runtime.rank() == 1) {
      // Rank 2 never calls it.
      expect_has(end_within(5, runtime.submit(named(given_up, "given up"))), Code::kCancelled,
                 {"rank 0", "gave it up", "enough"});
    }
    EXPECT_FALSE(pending->is_done());
    expect_world_goes_on(runtime);
    finish(pending);
  }
  EXPECT_EQ(other.back(), 3.0f);
  finish(runtime.submit(named(next, "next")));
  EXPECT_EQ(next.back(), 3.0f);
}

TEST(GroupAbort, OfWhatIsPendingHereLeavesTheRest) { on_every_place(3, give_up_what_is_pending); }

/// The number is free again after the group: what is left of the old one does not touch the new one.
TEST(GroupAbort, AnIdThatIsUsedAgainIsANewGroup) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    const std::vector<std::uint32_t> pair{0, 1};
    for (int round = 0; round < 20; ++round) {
      runtime.add_group(kPair, pair);
      std::vector<float> values(8, 1.0f);
      Request request = in_group(kPair, values);
      request.timeout = std::chrono::seconds(10);
      finish(runtime.submit(request));
      EXPECT_EQ(values.front(), 2.0f);
      expect_world_goes_on(runtime);  // What has not ended on rank 0 by then ends with the abort.
      if (runtime.rank() == 1) runtime.abort_group(kPair, "enough");
      runtime.remove_group(kPair);
      if (round % 2 == 0) expect_world_goes_on(runtime);
    }
  }));
}

TEST(GroupAbort, OfTheWholeJobEndsTheJob) {
  const auto errors = run_job({.workers = 2}, [](Runtime& runtime) {
    std::vector<float> values(8, 1.0f);
    if (runtime.rank() == 1) {
      runtime.abort_group(GroupId{0}, "enough");
      return;
    }
    const Status status = end_within(10, runtime.submit(all_reduce(values)));
    expect_has(status, Code::kPeerLost, {"worker 1", "enough"});
  });
  expect_clean(errors);
}

/// Rank 1 ends its program; the others wait for it in an operation and for a message, with a minute's patience.
void wait_for_one_that_left(Runtime& runtime) {
  expect_world_goes_on(runtime);
  if (runtime.rank() == 1) return;
  std::vector<float> values(kCount, 1.0f), message(8);
  const auto work = runtime.submit(all_reduce(values));
  const auto received = runtime.receive({GroupId{0}, 1, 3, std::as_writable_bytes(std::span(message))});
  expect_has(end_within(1.5, work), Code::kPeerLost, {"worker 1", "has left the job"});
  expect_has(end_within(1.5, received), Code::kPeerLost, {"worker 1", "has left the job"});
  expect_has(end_within(1.5, runtime.submit(all_reduce(values))), Code::kPeerLost, {"worker 1", "has left the job"});
}

TEST(Leaving, WhoWaitsForARankThatLeftHearsAtOnce) { on_every_place(3, wait_for_one_that_left); }

/// The first operation of a group: no server knows yet who is in it.
void wait_in_a_new_group_for_one_that_left(Runtime& runtime) {
  const std::vector<std::uint32_t> everybody{0, 1, 2};
  runtime.add_group(kPair, everybody);
  expect_world_goes_on(runtime);
  if (runtime.rank() == 1) return;
  std::vector<float> values(kCount, 1.0f);
  expect_has(end_within(3, runtime.submit(in_group(kPair, values))), Code::kPeerLost, {"1", "has left the"});
}

TEST(Leaving, WhoWaitsInANewGroupHearsAtOnce) { on_every_place(3, wait_in_a_new_group_for_one_that_left); }

/// Rank 1 leaves a group and stays in the job: what it has called there ends well, what it has not ends at once.
void leave_a_group(Runtime& runtime) {
  const std::vector<std::uint32_t> everybody{0, 1, 2};
  runtime.add_group(kPair, everybody);
  std::vector<float> joined(10 * kCount, 1.0f), alone(kCount, 1.0f), later(8, 1.0f), message(8);
  const auto work = runtime.submit(in_group(kPair, joined));
  if (runtime.rank() == 1) {
    const auto received = runtime.receive({kPair, 0, 3, std::as_writable_bytes(std::span(message))});
    runtime.leave_group(kPair);
    expect_has(end_within(3, received), Code::kCancelled, {"left the group"});
  } else {
    expect_has(end_within(3, runtime.submit(in_group(kPair, alone))), Code::kPeerLost, {"has left the group"});
    expect_has(end_within(3, runtime.submit(in_group(kPair, later))), Code::kPeerLost, {"has left the group"});
  }
  finish(work);
  EXPECT_EQ(joined.back(), 3.0f);
  expect_world_goes_on(runtime);
}

TEST(Leaving, AGroupEndsWhatTheOthersCallThereAlone) { on_every_place(3, leave_a_group); }

/// The news are there before the group is: nothing orders what one rank does to a group and what another does first.
void add_a_group_late(Runtime& runtime) {
  const std::vector<std::uint32_t> everybody{0, 1, 2};
  const GroupId given_up{8};
  expect_world_goes_on(runtime);
  std::vector<float> values(kCount, 1.0f), few(4, 1.0f);
  if (runtime.rank() == 1) {
    runtime.add_group(kPair, everybody);
    runtime.leave_group(kPair);
    runtime.add_group(given_up, everybody);
    runtime.abort_group(given_up, "enough");
    expect_world_goes_on(runtime);
    expect_world_goes_on(runtime);
    return;
  }
  expect_world_goes_on(runtime);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  runtime.add_group(kPair, everybody);
  runtime.add_group(given_up, everybody);
  expect_has(end_within(5, runtime.submit(in_group(kPair, values))), Code::kPeerLost, {"has left the group"});
  expect_has(end_within(5, runtime.submit(in_group(given_up, values))), Code::kCancelled, {"rank 1", "enough"});
  expect_world_goes_on(runtime);
}

TEST(Leaving, IsKnownToWhoAddsTheGroupLater) { on_every_place(3, add_a_group_late); }

/// Small and blocking: on one host the calling thread drives it, and has told the others before it looks.
void call_alone_in_a_group_that_was_left(Runtime& runtime) {
  const std::vector<std::uint32_t> everybody{0, 1, 2};
  runtime.add_group(kPair, everybody);
  expect_world_goes_on(runtime);
  if (runtime.rank() == 1) runtime.leave_group(kPair);
  expect_world_goes_on(runtime);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  for (int call = 0; runtime.rank() != 1 && call < 2; ++call) {
    std::vector<float> few(4, 1.0f);
    Status status;
    if (const auto work = runtime.run(in_group(kPair, few), status)) status = end_within(5, work);
    expect_has(status, Code::kPeerLost, {"worker 1", "has left the group"});
  }
  expect_world_goes_on(runtime);
}

TEST(Leaving, EndsASmallBlockingCallToo) { on_every_place(3, call_alone_in_a_group_that_was_left); }

/// It goes as soon as its own part is done, while the others are still getting theirs.
void join_and_go(Runtime& runtime) {
  std::vector<float> large(10 * kCount, 1.0f), small(4, 1.0f), given(kCount, static_cast<float>(runtime.rank()));
  std::vector<float> message(8, 5.0f);
  Request broadcast = all_reduce(given);
  broadcast.descriptor.collective = Collective::kBroadcast;
  broadcast.descriptor.root = 1;
  std::vector<std::shared_ptr<Work>> works{runtime.submit(all_reduce(large)), runtime.submit(broadcast)};
  if (runtime.rank() == 1) works.push_back(runtime.send({GroupId{0}, 0, 3, std::as_bytes(std::span(message))}));
  if (runtime.rank() == 0) {
    works.push_back(runtime.receive({GroupId{0}, 1, 3, std::as_writable_bytes(std::span(message))}));
  }
  Status status;
  if (const auto last = runtime.run(all_reduce(small), status)) works.push_back(last);
  status.or_throw();
  for (const auto& work : works) finish(work);
  EXPECT_EQ(large.back(), 3.0f);
  EXPECT_EQ(given.back(), 1.0f);
  EXPECT_EQ(small.back(), 3.0f);
}

TEST(Leaving, WhatARankJoinedBeforeItLeftIsNotLost) {
  for (int round = 0; round < 5; ++round) on_every_place(3, join_and_go);
}

}  // namespace
}  // namespace herring::runtime
