#include "control/protocol.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

#include "control/delta.h"

namespace herring::control {

std::string to_string(const Member& member) {
  return std::string(member.role == Role::kServer ? "server " : "worker ") + std::to_string(member.rank) + " (pid " +
         std::to_string(member.pid) + " on " + member.host_name + ")";
}

std::string to_string(const HubEvent& event) {
  switch (event.kind) {
    case HubEvent::Kind::kLeft:
    case HubEvent::Kind::kFinished:  // For those who wait for it there is no difference.
      return to_string(event.member) + " has left the job";
    case HubEvent::Kind::kFailed:
      return to_string(event.member) + " failed: " + event.reason;
    case HubEvent::Kind::kHubLost:
      return event.holder + ", which runs the job's hub, is lost: " + event.reason;
    case HubEvent::Kind::kGroupAborted:
      return "rank " + std::to_string(event.member.rank) + " aborted the group: " + event.reason;
    case HubEvent::Kind::kGroupLeft:
      return to_string(event.member) + " has left the group";
    case HubEvent::Kind::kLost:
      break;
  }
  return to_string(event.member) + " is lost: " + event.reason;
}

namespace {

/// Nanoseconds. It keeps every later sum of times far from overflow.
constexpr std::uint64_t kYear = 365ull * 24 * 3600 * 1'000'000'000;

UsedGroup read_group(BodyReader& reader) {
  UsedGroup group;
  group.id = GroupId{reader.u32()};
  group.use = reader.u32();
  return group;
}

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

Digest labelled(std::string_view secret, std::string_view label, const Digest& transcript) {
  BodyWriter input;
  input.raw(bytes_of(label)).raw(transcript);
  return hmac_sha256(bytes_of(secret), input.take());
}

void put_challenge_opening(BodyWriter& writer, const Challenge& challenge) {
  writer.u32(challenge.version).u64(challenge.features).raw(challenge.nonce);
  writer.u16(challenge.master_port).u8(challenge.started ? 1 : 0);
}

template <std::size_t kSize>
void copy_to(std::span<const std::byte> from, std::array<std::byte, kSize>& to) {
  if (from.size() == kSize) std::copy(from.begin(), from.end(), to.begin());
}

}  // namespace

std::vector<std::byte> encode(const Hello& hello) {
  BodyWriter writer;
  writer.u32(hello.version).u64(hello.features).raw(hello.nonce);
  return writer.take();
}

std::optional<Hello> decode_hello(std::span<const std::byte> body) {
  BodyReader reader(body);
  Hello hello;
  hello.version = reader.u32();
  if (!reader.ok()) return std::nullopt;
  if (hello.version != kProtocolVersion) return Hello{hello.version, 0, {}};
  hello.features = reader.u64();
  copy_to(reader.raw(kNonceBytes), hello.nonce);
  if (!reader.done()) return std::nullopt;
  return hello;
}

std::vector<std::byte> encode(const Challenge& challenge) {
  BodyWriter writer;
  put_challenge_opening(writer, challenge);
  writer.raw(challenge.proof);
  return writer.take();
}

std::optional<Challenge> decode_challenge(std::span<const std::byte> body) {
  BodyReader reader(body);
  Challenge challenge;
  challenge.version = reader.u32();
  challenge.features = reader.u64();
  copy_to(reader.raw(kNonceBytes), challenge.nonce);
  challenge.master_port = reader.u16();
  const std::uint8_t started = reader.u8();
  copy_to(reader.raw(challenge.proof.size()), challenge.proof);
  if (!reader.done() || started > 1) return std::nullopt;
  challenge.started = started == 1;
  return challenge;
}

Digest transcript(const Hello& hello, const Challenge& challenge) {
  BodyWriter writer;
  writer.raw(bytes_of("herring control transcript")).raw(encode(hello));
  put_challenge_opening(writer, challenge);
  return sha256(writer.take());
}

Digest hub_proof(std::string_view secret, const Digest& transcript) {
  return labelled(secret, "herring hub proof", transcript);
}

SessionKeys session_keys(std::string_view secret, const Digest& transcript) {
  return {labelled(secret, "herring member to hub", transcript), labelled(secret, "herring hub to member", transcript)};
}

std::vector<std::byte> encode(const Refuse& refuse) {
  BodyWriter writer;
  writer.u8(static_cast<std::uint8_t>(refuse.code)).text(refuse.text, kMaxHandshakeBody - 16);
  return writer.take();
}

std::optional<Refuse> decode_refuse(std::span<const std::byte> body) {
  BodyReader reader(body);
  const std::uint8_t code = reader.u8();
  Refuse refuse{static_cast<RefuseCode>(code), reader.words(kMaxText)};
  if (!reader.done() || code < 1 || code > static_cast<std::uint8_t>(RefuseCode::kOtherJob)) return std::nullopt;
  return refuse;
}

std::vector<std::byte> encode(const Join& join) {
  BodyWriter writer;
  writer.u8(static_cast<std::uint8_t>(join.member.role)).u32(join.member.rank).u32(join.workers).u32(join.servers);
  writer.u32(join.member.pid).text(join.member.host_identity, kMaxIdentity).text(join.member.host_name, kMaxIdentity);
  writer.text(join.member.launch, kMaxIdentity).u64(join.member.nodes);
  return writer.take();
}

std::optional<Join> decode_join(std::span<const std::byte> body) {
  BodyReader reader(body);
  Join join;
  const std::uint8_t role = reader.u8();
  join.member.role = static_cast<Role>(role);
  join.member.rank = reader.u32();
  join.workers = reader.u32();
  join.servers = reader.u32();
  join.member.pid = reader.u32();
  join.member.host_identity = reader.text(kMaxIdentity);
  join.member.host_name = reader.words(kMaxIdentity);
  join.member.launch = reader.text(kMaxIdentity);
  join.member.nodes = reader.u64();
  if (!reader.done() || (role != 1 && role != 2)) return std::nullopt;
  return join;
}

std::vector<std::byte> encode(const Welcome& welcome) {
  BodyWriter writer;
  writer.u64(static_cast<std::uint64_t>(welcome.heartbeat.count()));
  writer.u64(static_cast<std::uint64_t>(welcome.dead_after.count()));
  return writer.take();
}

std::optional<Welcome> decode_welcome(std::span<const std::byte> body) {
  BodyReader reader(body);
  const std::uint64_t heartbeat = reader.u64();
  const std::uint64_t dead_after = reader.u64();
  if (!reader.done() || heartbeat == 0 || dead_after == 0 || heartbeat > kYear || dead_after > kYear) {
    return std::nullopt;
  }
  return Welcome{Duration(static_cast<std::int64_t>(heartbeat)), Duration(static_cast<std::int64_t>(dead_after))};
}

std::string shortened_identity(const std::string& identity) {
  constexpr std::size_t kShort = 32;
  constexpr std::size_t kDigits = 15;  // A string of so many takes no memory of its own.
  if (identity.size() <= kShort) return identity;
  const Digest digest = sha256(bytes_of(identity));
  std::string text;
  for (std::size_t i = 0; i < kDigits; ++i) {
    const unsigned byte = std::to_integer<unsigned>(digest[i / 2]);
    text += "0123456789abcdef"[i % 2 == 0 ? byte >> 4 : byte & 15];
  }
  return text;
}

std::vector<std::vector<std::byte>> encode_roster(std::uint64_t job_id, std::span<const Member> members) {
  constexpr std::size_t kMaxEntry = 2 * 5 + 2 * (2 + kMaxIdentity) + 8;
  std::vector<std::vector<std::byte>> frames;
  std::size_t first = 0;
  while (first < members.size()) {
    Strings hosts;
    std::map<std::vector<std::byte>, std::size_t> number;
    BodyWriter entries;
    std::size_t count = 0;
    std::size_t host_bytes = 0;
    for (; first + count < members.size() && entries.size() + host_bytes + kMaxEntry <= kMaxBlob; ++count) {
      const Member& member = members[first + count];
      BodyWriter host;
      host.text(shortened_identity(member.host_identity), kMaxIdentity).text(member.host_name, kMaxIdentity);
      host.u64(member.nodes);
      const auto [found, is_new] = number.try_emplace(host.take(), hosts.size());
      if (is_new) hosts.push_back(found->first);
      if (is_new) host_bytes += found->first.size();
      entries.count(member.pid).count(found->second);
    }
    BodyWriter writer;
    writer.u64(job_id).u32(static_cast<std::uint32_t>(members.size())).u32(static_cast<std::uint32_t>(first));
    writer.u32(static_cast<std::uint32_t>(count)).u32(static_cast<std::uint32_t>(hosts.size()));
    frames.push_back(writer.raw(encode_list(hosts)).raw(entries.take()).take());
    first += count;
  }
  return frames;
}

void Roster::add(Roster more) {
  const auto before = static_cast<std::uint32_t>(hosts.size());
  std::ranges::move(more.hosts, std::back_inserter(hosts));
  for (const Place& place : more.members) members.push_back({place.pid, place.host + before});
}

std::optional<Roster> decode_roster(std::span<const std::byte> body) {
  BodyReader reader(body);
  Roster roster;
  roster.job_id = reader.u64();
  roster.total = reader.u32();
  roster.first = reader.u32();
  const std::uint32_t count = reader.u32();
  const std::uint32_t host_count = reader.u32();
  const auto encoded = decode_list(reader, host_count, kMaxBlob);
  if (!encoded) return std::nullopt;
  for (std::size_t i = 0; i < encoded->size(); ++i) {
    BodyReader text((*encoded)[i]);
    Roster::Host host{text.text(kMaxIdentity), {}};
    host.name = text.words(kMaxIdentity);
    host.nodes = text.u64();
    if (!text.done()) return std::nullopt;
    roster.hosts.push_back(std::move(host));
  }
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
    const std::uint64_t pid = reader.count();
    const std::uint64_t host = reader.count();
    if (!reader.ok() || host >= roster.hosts.size()) return std::nullopt;
    if (pid > std::numeric_limits<std::uint32_t>::max()) return std::nullopt;
    roster.members.push_back({static_cast<std::uint32_t>(pid), static_cast<std::uint32_t>(host)});
  }
  if (!reader.done() || count == 0 || std::uint64_t{roster.first} + count > roster.total) return std::nullopt;
  return roster;
}

std::vector<std::byte> encode(const Event& event) {
  BodyWriter writer;
  writer.u8(static_cast<std::uint8_t>(static_cast<int>(event.kind) + 1)).u32(event.index).text(event.reason, kMaxText);
  const bool has_left = event.kind == HubEvent::Kind::kGroupLeft;
  if (has_left || event.kind == HubEvent::Kind::kGroupAborted) {
    writer.u32(event.group.id.value).u32(event.group.use);
  }
  if (has_left) writer.u64(event.calls);
  return writer.take();
}

std::optional<Event> decode_event(std::span<const std::byte> body) {
  BodyReader reader(body);
  const std::uint8_t kind = reader.u8();
  Event event;
  event.index = reader.u32();
  event.reason = reader.words(kMaxText);
  if (kind < 1 || kind > 6) return std::nullopt;
  event.kind = static_cast<HubEvent::Kind>(kind - 1);
  const bool has_left = event.kind == HubEvent::Kind::kGroupLeft;
  if (has_left || event.kind == HubEvent::Kind::kGroupAborted) event.group = read_group(reader);
  if (has_left) event.calls = reader.u64();
  if (!reader.done()) return std::nullopt;
  return event;
}

std::vector<std::byte> encode(const AbortGroup& abort) {
  BodyWriter writer;
  writer.u32(abort.group.id.value).u32(abort.group.use).text(abort.reason, kMaxText);
  return writer.take();
}

std::optional<AbortGroup> decode_abort_group(std::span<const std::byte> body) {
  BodyReader reader(body);
  AbortGroup abort;
  abort.group = read_group(reader);
  abort.reason = reader.words(kMaxText);
  if (!reader.done() || abort.group.id == GroupId{0}) return std::nullopt;
  return abort;
}

std::vector<std::byte> encode(const LeaveGroup& leave) {
  BodyWriter writer;
  writer.u32(leave.group.id.value).u32(leave.group.use).u64(leave.calls);
  return writer.take();
}

std::optional<LeaveGroup> decode_leave_group(std::span<const std::byte> body) {
  BodyReader reader(body);
  LeaveGroup leave;
  leave.group = read_group(reader);
  leave.calls = reader.u64();
  if (!reader.done() || leave.group.id == GroupId{0}) return std::nullopt;
  return leave;
}

std::vector<std::byte> encode(const Exchange& exchange) {
  BodyWriter writer;
  writer.text(exchange.name, kMaxName).u8(exchange.wants == Wants::kBlobs ? 1 : 0).raw(exchange.blob);
  return writer.take();
}

std::optional<Exchange> decode_exchange(std::span<const std::byte> body) {
  BodyReader reader(body);
  Exchange exchange;
  exchange.name = reader.text(kMaxName);
  const std::uint8_t wants = reader.u8();
  exchange.wants = wants == 1 ? Wants::kBlobs : Wants::kNothing;
  exchange.blob = reader.rest();
  if (!reader.done() || exchange.name.empty() || wants > 1 || exchange.blob.size() > kMaxBlob) return std::nullopt;
  return exchange;
}

std::vector<std::byte> encode_completed(const std::string& name) {
  BodyWriter writer;
  writer.text(name, kMaxName).u32(0).u32(0);
  return writer.take();
}

std::vector<std::vector<std::byte>> encode_gathered(const std::string& name,
                                                    std::span<const std::vector<std::byte>> blobs) {
  std::vector<std::vector<std::byte>> frames;
  std::size_t first = 0;
  while (first < blobs.size()) {
    std::size_t count = 0;
    std::size_t bytes = 0;
    // At least one; more while the frame stays within what a single largest blob needs.
    while (first + count < blobs.size() && (count == 0 || bytes + 4 + blobs[first + count].size() <= kMaxBlob)) {
      bytes += 4 + blobs[first + count].size();
      ++count;
    }
    BodyWriter writer;
    writer.text(name, kMaxName).u32(static_cast<std::uint32_t>(first)).u32(static_cast<std::uint32_t>(count));
    writer.raw(encode_list(blobs.subspan(first, count)));
    frames.push_back(writer.take());
    first += count;
  }
  return frames;
}

std::optional<Gathered> decode_gathered(std::span<const std::byte> body) {
  BodyReader reader(body);
  Gathered gathered;
  gathered.name = reader.text(kMaxName);
  gathered.first = reader.u32();
  const std::uint32_t count = reader.u32();
  auto blobs = decode_list(reader, count, kMaxBlob);
  if (!blobs || !reader.done() || (count == 0 && gathered.first != 0) ||
      std::uint64_t{gathered.first} + count > std::numeric_limits<std::uint32_t>::max()) {
    return std::nullopt;
  }
  gathered.blobs = std::move(*blobs);
  return gathered;
}

std::vector<std::byte> encode(const ExchangeFailed& failed) {
  BodyWriter writer;
  writer.text(failed.name, kMaxName).u32(failed.index).text(failed.text, kMaxText);
  return writer.take();
}

std::optional<ExchangeFailed> decode_exchange_failed(std::span<const std::byte> body) {
  BodyReader reader(body);
  ExchangeFailed failed;
  failed.name = reader.text(kMaxName);
  failed.index = reader.u32();
  failed.text = reader.words(kMaxText);
  if (!reader.done()) return std::nullopt;
  return failed;
}

std::vector<std::byte> encode(const Unreachable& unreachable) {
  BodyWriter writer;
  writer.u64(static_cast<std::uint64_t>(unreachable.silent.count())).u32(unreachable.of).u32(unreachable.answering);
  writer.u32(static_cast<std::uint32_t>(unreachable.indices.size()));
  for (const std::uint32_t index : unreachable.indices) writer.u32(index);
  return writer.take();
}

std::optional<Unreachable> decode_unreachable(std::span<const std::byte> body) {
  BodyReader reader(body);
  Unreachable unreachable;
  const std::uint64_t silent = reader.u64();
  unreachable.of = reader.u32();
  unreachable.answering = reader.u32();
  const std::uint32_t count = reader.u32();
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) unreachable.indices.push_back(reader.u32());
  if (!reader.done() || count == 0 || count > unreachable.of || silent > kYear) return std::nullopt;
  unreachable.silent = Duration(static_cast<std::int64_t>(silent));
  return unreachable;
}

std::vector<std::byte> encode_missing(std::string_view name, std::string_view text) {
  BodyWriter writer;
  writer.text(name, kMaxName).text(text, kMaxText);
  return writer.take();
}

std::optional<std::pair<std::string, std::string>> decode_missing(std::span<const std::byte> body) {
  BodyReader reader(body);
  std::string name = reader.text(kMaxName);
  std::string text = reader.words(kMaxText);
  if (!reader.done()) return std::nullopt;
  return std::pair(std::move(name), std::move(text));
}

std::vector<std::byte> encode_serial(std::uint64_t serial) {
  BodyWriter writer;
  writer.u64(serial);
  return writer.take();
}

std::optional<std::uint64_t> decode_serial(std::span<const std::byte> body) {
  BodyReader reader(body);
  const std::uint64_t serial = reader.u64();
  if (!reader.done()) return std::nullopt;
  return serial;
}

std::vector<std::byte> encode_text(std::string_view text) {
  BodyWriter writer;
  writer.text(text, kMaxText);
  return writer.take();
}

std::optional<std::string> decode_text(std::span<const std::byte> body) {
  BodyReader reader(body);
  std::string text = reader.words(kMaxText);
  if (!reader.done()) return std::nullopt;
  return text;
}

std::string seconds_text(Duration duration) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f s", std::chrono::duration<double>(duration).count());
  return text.data();
}

}  // namespace herring::control
