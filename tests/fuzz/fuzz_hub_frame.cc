#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "control/delta.h"
#include "control/frame.h"
#include "control/membership.h"
#include "control/protocol.h"

/// Feeds arbitrary bytes to what a hub and its members do with bytes from the network: cutting frames, decoding bodies,
/// and the hub's state machine. The first byte says how the stream is split into reads.
namespace {

using namespace herring;
using namespace herring::control;

void require(bool condition) {
  if (!condition) std::abort();
}

bool same(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

/// What decodes must encode to the same bytes: there is one way to say a thing. `shown` is what came, encoded again,
/// where its texts are shown to people: what would steer a terminal, or is no UTF-8, has become '?', and stays so.
template <class Decode, class Encode>
void check_shown(std::span<const std::byte> body, Decode decode, Encode encode) {
  const auto it = decode(body);
  if (!it) return;
  const auto shown = encode(*it);
  if (same(shown, body)) return;
  require(shown.size() <= body.size() && std::count(shown.begin(), shown.end(), std::byte{'?'}) > 0);
  const auto again = decode(shown);
  require(again && same(encode(*again), shown));
}

void check_bodies(std::span<const std::byte> body) {
  const auto encode_it = [](const auto& it) { return encode(it); };
  if (const auto it = decode_hello(body); it && it->version == kProtocolVersion) require(same(encode(*it), body));
  if (const auto it = decode_challenge(body)) require(same(encode(*it), body));
  if (const auto it = decode_refuse(body); it && it->text.size() <= kMaxHandshakeBody - 16) {
    check_shown(body, decode_refuse, encode_it);
  }
  check_shown(body, decode_join, encode_it);
  if (const auto it = decode_welcome(body)) require(same(encode(*it), body));
  check_shown(body, decode_event, encode_it);
  check_shown(body, decode_exchange, encode_it);
  check_shown(body, decode_exchange_failed, encode_it);
  check_shown(body, decode_missing, [](const auto& it) { return encode_missing(it.first, it.second); });
  if (const auto it = decode_serial(body)) require(same(encode_serial(*it), body));
  if (const auto it = decode_unreachable(body)) require(same(encode(*it), body));
  check_shown(body, decode_text, [](const auto& it) { return encode_text(it); });
  if (const auto it = decode_roster(body)) require(it->first + it->members.size() <= it->total);
  if (const auto it = decode_gathered(body)) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < it->blobs.size(); ++i) bytes += it->blobs[i].size();
    require(bytes <= kMaxBlob);
    const auto encoded = encode_list(it->blobs.apart());
    BodyReader reader(encoded);
    require(decode_list(reader, static_cast<std::uint32_t>(it->blobs.size()), kMaxBlob) == it->blobs && reader.done());
  }
}

std::vector<Frame> cut(std::span<const std::byte> stream, std::size_t read_bytes) {
  FrameReader reader(kMaxHandshakeBody);
  std::vector<Frame> frames;
  Frame frame;
  for (std::size_t at = 0; at < stream.size(); at += read_bytes) {
    reader.feed(stream.subspan(at, std::min(read_bytes, stream.size() - at)));
    while (reader.next(frame) == FrameReader::Result::kFrame) frames.push_back(frame);
  }
  return frames;
}

/// A job of three; frames come from its members in turn, time passes.
void drive_membership(std::span<const Frame> frames) {
  Membership membership({2, 1, std::chrono::milliseconds(100), std::chrono::milliseconds(300), 1});
  Instant now{std::chrono::hours(1)};
  ConnectionId next = 1;
  for (std::uint32_t i = 0; i < 3; ++i) {
    const Member member{i < 2 ? Role::kWorker : Role::kServer, i % 2, 1, "host", "host"};
    membership.join(next++, Join{member, 2, 1}, now);
  }
  for (std::size_t i = 0; i < frames.size(); ++i) {
    const Frame& frame = frames[i];
    if (frame.type == FrameType::kJoin) {
      if (const auto join = decode_join(frame.body)) membership.join(next++, *join, now);
    } else if (frame.type == FrameType::kClosing) {
      membership.disconnected(1 + i % 3, "closed", now);
    } else {
      membership.receive(1 + frame.body.size() % 3, frame, now);
    }
    now += std::chrono::milliseconds(i % 5 == 0 ? 60 : 1);
    membership.tick(now);
    for (const auto& action : membership.take_actions()) {
      require(action.connection != 0);
      if (action.body) require(action.body->bytes().size() <= kMaxBody);
    }
    require(membership.connected() <= 3);
  }
  membership.close();
  require(membership.connected() == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto stream = std::as_bytes(std::span(data + 1, size - 1));
  check_bodies(stream);
  const std::vector<Frame> whole = cut(stream, stream.size() + 1);
  const std::vector<Frame> split = cut(stream, 1 + data[0] % 64);
  require(whole.size() == split.size());
  for (std::size_t i = 0; i < whole.size(); ++i) {
    require(whole[i].type == split[i].type && whole[i].body == split[i].body && whole[i].mac == split[i].mac);
    check_bodies(whole[i].body);
  }
  drive_membership(whole);
  return 0;
}
