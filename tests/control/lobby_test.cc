#include <gtest/gtest.h>

#include <chrono>

#include "control/lobby.h"

namespace herring::control {
namespace {

using namespace std::chrono_literals;

TEST(Lobby, MakesRoomByOneThatIsInsideAndTimesOut) {
  const Instant start{1h};
  Lobby lobby(2, 5s, 1);
  EXPECT_EQ(lobby.next_wakeup(), Instant::max());
  EXPECT_FALSE(lobby.evict());
  EXPECT_FALSE(lobby.make_room());
  lobby.enter(7, start);
  EXPECT_FALSE(lobby.make_room());
  lobby.enter(5, start + 1s);
  const auto evicted = lobby.make_room();
  ASSERT_TRUE(evicted);
  EXPECT_TRUE(*evicted == 7 || *evicted == 5);
  EXPECT_FALSE(lobby.contains(*evicted));
  lobby.enter(6, start + 2s);
  EXPECT_EQ(lobby.size(), 2u);
  const ConnectionId other = *evicted == 7 ? 5 : 7;
  const Instant since = other == 7 ? start : start + 1s;
  EXPECT_EQ(lobby.next_wakeup(), since + 5s);
  lobby.leave(99);
  EXPECT_TRUE(lobby.overdue(since + 4s).empty());
  EXPECT_EQ(lobby.overdue(since + 5s), std::vector<ConnectionId>{other});
  lobby.leave(6);
  EXPECT_EQ(lobby.size(), 0u);
}

/// A member on a slow link is still in its handshake while as many strangers come as the lobby has places. Were it
/// always the oldest that makes room, it would never come in, however often it tries.
// Thousands of members that come in one second would push each other out, and all have to try again.
TEST(Lobby, HasRoomForThoseWhoAreExpected) {
  Lobby lobby(2, 6s, 1);
  lobby.set_capacity(4);
  for (ConnectionId id = 1; id <= 4; ++id) {
    EXPECT_FALSE(lobby.make_room());
    lobby.enter(id, Instant{});
  }
  EXPECT_TRUE(lobby.make_room());
  lobby.set_capacity(2);
  EXPECT_EQ(lobby.size(), 3u) << "nobody leaves where nobody needs the room";
  EXPECT_TRUE(lobby.make_room());
}

TEST(Lobby, WhoTriesAgainComesThroughAFlood) {
  constexpr int kPlaces = 64;
  int came_through = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Lobby lobby(kPlaces, 5s, seed);
    const Instant now{1h};
    ConnectionId next = 2;
    const auto come = [&](ConnectionId id) {
      static_cast<void>(lobby.make_room());
      lobby.enter(id, now);
    };
    while (lobby.size() < kPlaces) come(next++);
    come(1);
    for (int i = 0; i < kPlaces; ++i) come(next++);
    EXPECT_EQ(lobby.size(), static_cast<std::size_t>(kPlaces));
    came_through += lobby.contains(1) ? 1 : 0;
  }
  EXPECT_GT(came_through, 40) << "about 1 in e";
  EXPECT_LT(came_through, 120);
}

}  // namespace
}  // namespace herring::control
