#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iostream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "control/frame.h"
#include "control/protocol.h"
#include "engine_program.h"
#include "message_program.h"
#include "wire/header.h"
#include "worker_program.h"

/// Writes the first inputs of each fuzz target: make_corpus tests/fuzz/corpus
namespace herring::fuzz {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::uint8_t>;

class Corpus {
 public:
  explicit Corpus(fs::path root) : root_(std::move(root)) {}

  void add(std::string_view target, std::string_view name, const Bytes& bytes) const {
    fs::create_directories(root_ / target);
    std::ofstream file(root_ / target / name, std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    if (!file) throw std::runtime_error("cannot write " + (root_ / target / name).string());
  }
  void add(std::string_view target, std::string_view name, std::string_view text) const {
    add(target, name, Bytes(text.begin(), text.end()));
  }

 private:
  fs::path root_;
};

void append(Bytes& out, std::span<const std::byte> bytes) {
  std::transform(bytes.begin(), bytes.end(), std::back_inserter(out),
                 [](std::byte b) { return std::to_integer<std::uint8_t>(b); });
}

void add_headers(const Corpus& corpus) {
  constexpr std::string_view kNames[] = {"announce", "grant",  "push",   "result", "error", "cancel",   "credit",
                                         "envelope", "accept", "invite", "data",   "close", "withdraw", "return"};
  for (std::uint8_t type = 1; type <= 14; ++type) {
    wire::Header header;
    header.type = static_cast<wire::MessageType>(type);
    header.flags = type == 1 ? wire::kFlagEager : type == 4 ? wire::kFlagNoPayload : std::uint16_t{0};
    header.job_id = 77;
    header.tag = 1000;
    header.chunk = 3;
    header.count = 2;
    wire::Announce announce;
    announce.descriptor.dims = 1;
    announce.descriptor.shape[0] = 1000;
    announce.descriptor.op_bytes = announce.descriptor.part_bytes = 4000;
    announce.descriptor.collective = static_cast<Collective>(std::min<int>(type, 3));
    announce.contributor_count = announce.rank_count = 4;
    announce.shard_bytes = 4000;
    announce.chunk_bytes = 1024;
    announce.owned_count = 4;
    announce.timeout_ms = 1000;
    header.payload_bytes = wire::kAnnounceBytes;
    Bytes bytes;
    append(bytes, wire::encode(header));
    append(bytes, wire::encode(announce));
    corpus.add("header", kNames[type - 1], bytes);
  }
  corpus.add("header", "empty", "");
}

void add_configs(const Corpus& corpus) {
  corpus.add("config", "plain", "HERRING_LANES=2\nHERRING_CHUNK_BYTES=64KB\nHERRING_LOG=debug\n");
  corpus.add("config", "override", "HERRING_LANES=2\n\nHERRING_LANES=3\n");
  corpus.add("config", "unknown", "HERRING_CHUNK=1\nPATH=/bin\nHERRING_TEST_SEED=1\n");
  corpus.add("config", "contradiction", "HERRING_CHUNK_BYTES=1MB\nHERRING_PART_BYTES=512KB\n");
  corpus.add("config", "adjusted", "HERRING_DEAD_AFTER_S=0.005\nHERRING_ARENA_BYTES=1MB\nHERRING_PART_BYTES=64\n");
  corpus.add("config", "hub", "HERRING_HUB=[::1]:29500\nHERRING_SECRET=s\nHERRING_PROVIDER=tcp\n");
  std::string indexed;
  for (char index = 0; index < 0x1F; ++index) {
    if (index == '\n') continue;
    indexed += index;
    indexed += "64\n";
  }
  corpus.add("config", "indexed", indexed);
}

constexpr std::uint8_t op(Step step) { return static_cast<std::uint8_t>(step); }

/// worker, key, kind, share, no mutation
void announce(Bytes& program, std::uint8_t worker, std::uint8_t kind, std::uint8_t key = 0) {
  program.insert(program.end(), {op(Step::kAnnounce), worker, key, kind, 0, 0});
}

void add_backup_programs(const Corpus& corpus) {
  const auto says = [](Bytes& program, std::uint8_t worker, std::uint8_t kind, std::uint8_t share) {
    program.insert(program.end(), {op(Step::kAnnounce), worker, 0, kind, share, 0});
  };
  for (const std::uint8_t kind : {0x00, 0x50, 0x04}) {
    for (const std::uint8_t grace : {std::uint8_t{0}, kSetupGrace}) {
      Bytes late = {static_cast<std::uint8_t>(2 | kSetupBackup | grace)};
      for (const std::uint8_t worker : {0, 1}) says(late, worker, kKindNoShare, 0x10);
      late.insert(late.end(), {op(Step::kTick), 2, op(Step::kSettle)});
      for (const std::uint8_t worker : {0, 1}) says(late, worker, kind, 0x30);
      late.push_back(op(Step::kSettle));
      says(late, 2, kKindNoShare, 0x10);
      says(late, 2, kind & 0xF0u, 0x30);
      late.push_back(op(Step::kSettle));
      corpus.add("server_engine", "backup_late_" + std::to_string(kind) + "_" + std::to_string(grace), late);
    }
  }
  // The late one never comes: its time runs out.
  Bytes never = {2 | kSetupBackup};
  for (const std::uint8_t worker : {0, 1}) says(never, worker, kKindNoShare, 0x10);
  for (const std::uint8_t worker : {0, 1}) says(never, worker, 0x00, 0x30);
  never.insert(never.end(), {op(Step::kSettle), op(Step::kTick), 60, op(Step::kSettle)});
  says(never, 2, kKindNoShare, 0x10);
  corpus.add("server_engine", "backup_never", never);
}

void add_failover_programs(const Corpus& corpus) {
  const auto moves = [](Bytes& program, std::uint8_t worker, std::uint8_t kind, std::uint8_t share) {
    program.insert(program.end(), {op(Step::kAnnounce), worker, 0, kind, share, 0});
  };
  Bytes settled = {1 | kSetupFailover};
  announce(settled, 0, 0x00);
  announce(settled, 1, 0x00);
  settled.insert(settled.end(), {op(Step::kSettle), op(Step::kReceipt), 0, 0, 1, 0, op(Step::kReceipt), 1, 0, 1, 0});
  settled.insert(settled.end(), {op(Step::kTick), 1, op(Step::kSettle)});
  corpus.add("server_engine", "failover_settled", settled);

  // One of them has its data in a device, also where its server was lost.
  for (const std::uint8_t share : {0x00, 0x20}) {
    Bytes apart = {1 | kSetupFailover};
    moves(apart, 0, kKindApart, share);
    announce(apart, 1, 0x00);
    apart.insert(apart.end(), {op(Step::kReady), 0, 0, op(Step::kSettle), op(Step::kReceipt), 0, 0, 1, 0});
    corpus.add("server_engine", "failover_apart_" + std::to_string(share), apart);
  }

  // The first worker has one of two chunks of the result.
  Bytes moved = {1 | kSetupFailover};
  moves(moved, 0, 0x00, 0x20);
  moves(moved, 1, 0x00, 0x10);
  moved.insert(moved.end(), {op(Step::kReady), 0, 0, op(Step::kSettle), op(Step::kReceipt), 0, 0, 1, 0});
  corpus.add("server_engine", "failover_moved", moved);

  // The other worker was told that it is settled and never announces.
  Bytes forgotten = {1 | kSetupFailover};
  moves(forgotten, 0, 0x00, 0x60);
  forgotten.insert(forgotten.end(), {op(Step::kMoved), 0, 0, 0, 0, op(Step::kMoved), 1, 0, 0, 0, op(Step::kSettle)});
  corpus.add("server_engine", "failover_forgotten", forgotten);
}

void add_programs(const Corpus& corpus) {
  add_backup_programs(corpus);
  add_failover_programs(corpus);
  constexpr std::string_view kNames[] = {"all_reduce", "broadcast", "all_gather", "barrier"};
  for (std::uint8_t collective = 0; collective < 4; ++collective) {
    for (const std::uint8_t size : {0x00, 0x10, 0x30, 0x70}) {
      Bytes program = {2};
      for (std::uint8_t worker = 0; worker < 3; ++worker) announce(program, worker, collective | size);
      program.push_back(op(Step::kSettle));
      corpus.add("server_engine", std::string(kNames[collective]) + "_" + std::to_string(size >> 4), program);
    }
  }
  Bytes eager = {1};
  announce(eager, 0, kKindEager);
  announce(eager, 1, kKindEager);
  eager.push_back(op(Step::kSettle));
  corpus.add("server_engine", "eager", eager);

  Bytes apart = {2};
  for (const std::uint8_t worker : {0, 1, 2}) announce(apart, worker, worker == 1 ? 0 : kKindApart);
  apart.push_back(op(Step::kSettle));
  corpus.add("server_engine", "apart", apart);

  Bytes mismatch = {1};
  announce(mismatch, 0, 0x00);
  announce(mismatch, 1, 0x10);
  mismatch.insert(mismatch.end(), {op(Step::kTick), 30, op(Step::kSettle)});
  corpus.add("server_engine", "mismatch", mismatch);

  Bytes timeout = {1};
  announce(timeout, 0, 0x70);
  timeout.insert(timeout.end(), {op(Step::kTick), 60});
  announce(timeout, 1, 0x70);
  corpus.add("server_engine", "timeout", timeout);

  Bytes lost = {1};
  announce(lost, 0, 0x70);
  announce(lost, 1, 0x70);
  lost.insert(lost.end(), {op(Step::kPush), 0, 0, op(Step::kLost), 1, op(Step::kSettle)});
  corpus.add("server_engine", "lost", lost);

  Bytes cancelled = {1};
  announce(cancelled, 0, 0x70);
  announce(cancelled, 1, 0x70);
  cancelled.insert(cancelled.end(), {op(Step::kPush), 0, 0, op(Step::kCancel), 1, 1, 0, 1, 0, op(Step::kSettle)});
  corpus.add("server_engine", "cancelled", cancelled);

  Bytes noisy = {1};
  announce(noisy, 0, 0x00);
  announce(noisy, 1, 0x00);
  for (int i = 0; i < 12; ++i) noisy.insert(noisy.end(), {op(Step::kNoise), 0});
  corpus.add("server_engine", "noisy", noisy);

  // A process with its share of the result announces the next operation of the key, over and over.
  Bytes ahead = {2 | kSetupShared};
  for (std::uint8_t worker = 0; worker < 3; ++worker) announce(ahead, worker, 0x00);
  announce(ahead, 0, 0x00);
  ahead.insert(ahead.end(), {op(Step::kFlood), 0, 255, op(Step::kSettle)});
  corpus.add("server_engine", "ahead", ahead);

  for (const std::uint8_t kind : {0x00, 0x30, 0x03}) {
    Bytes flood = {1};
    announce(flood, 0, kind);
    flood.insert(flood.end(), {op(Step::kFlood), 0, 255, op(Step::kLost), 1, op(Step::kFlood), 0, 255});
    corpus.add("server_engine", "flood_" + std::to_string(kind), flood);
  }
}

/// A first byte (the size of the reads) and a frame of each type; "session" has them one after the other.
void add_hub_frames(const Corpus& corpus) {
  using namespace control;
  using control::Role;
  const control::Member member{Role::kWorker, 1, 4711, "node-b", "host-2"};
  const std::vector<std::byte> blob(100, std::byte{7});
  const std::vector<std::vector<std::byte>> blobs{blob, {}, blob};
  const std::vector<std::pair<FrameType, std::vector<std::byte>>> frames{
      {FrameType::kHello, encode(Hello{})},
      {FrameType::kChallenge, encode(Challenge{})},
      {FrameType::kRefuse, encode(Refuse{RefuseCode::kSizes, "sizes differ"})},
      {FrameType::kJoin, encode(Join{member, 2, 1})},
      {FrameType::kWelcome, encode(Welcome{std::chrono::seconds(1), std::chrono::seconds(5)})},
      {FrameType::kRoster, encode_roster(77, std::vector{member, member}).front()},
      {FrameType::kPing, encode_serial(3)},
      {FrameType::kPong, encode_serial(3)},
      {FrameType::kEvent, encode(Event{control::HubEvent::Kind::kLost, 1, "silent"})},
      {FrameType::kExchange, encode(Exchange{"connect", blob})},
      {FrameType::kGathered, encode_gathered("connect", blobs).front()},
      {FrameType::kExchangeFailed, encode(ExchangeFailed{"connect", 1, "gone"})},
      {FrameType::kQuery, encode_text("connect")},
      {FrameType::kMissing, encode_missing("connect", "worker 1")},
      {FrameType::kFail, encode_text("ValueError")},
      {FrameType::kUnreachable, encode(Unreachable{std::chrono::seconds(7), 2, 1, {0}})},
      {FrameType::kLeaveGroup, encode(LeaveGroup{{GroupId{5}, 1}, 7})},
      {FrameType::kAbortGroup, encode(AbortGroup{{GroupId{5}, 1}, "the user's reason"})},
      {FrameType::kLeave, {}},
      {FrameType::kClosing, encode_text("worker 0 left")},
  };
  Bytes session{5};
  for (const auto& [type, body] : frames) {
    Bytes frame;
    append(frame, frame_head(type, body.size()));
    append(frame, Mac{});
    append(frame, body);
    session.insert(session.end(), frame.begin(), frame.end());
    frame.insert(frame.begin(), 63);
    const std::string number = std::to_string(static_cast<int>(type));
    corpus.add("hub_frame", "frame" + number, frame);
    Bytes only_body{1};
    append(only_body, body);
    corpus.add("hub_frame", "body" + number, only_body);
  }
  corpus.add("hub_frame", "session", session);
}

constexpr std::uint8_t op(MessageStep step) { return static_cast<std::uint8_t>(step); }

/// A message of worker 0 (its size: an index of fuzz_point_to_point's sizes; 8: inside the envelope), not mutated.
void envelope(Bytes& program, std::uint8_t number, std::uint8_t size) {
  program.insert(program.end(), {op(MessageStep::kControl), 0, 0, number, size, 0, 0, 0});
}

/// An answer of worker 0 to our send.
void answer(Bytes& program, wire::MessageType type, std::uint8_t send, std::uint8_t chunk, std::uint8_t count) {
  const auto number = static_cast<std::uint8_t>(static_cast<std::uint8_t>(type) - 8);
  program.insert(program.end(), {op(MessageStep::kControl), 0, number, send, chunk, count, 0, 0});
}

void add_messages(const Corpus& corpus) {
  constexpr std::uint8_t kFromAnybody = 8, kAnyTag = 4;
  for (const std::uint8_t size : {0, 1, 2, 4, 6, 7}) {
    for (const std::uint8_t how : {0, int{kFromAnybody}, int{kAnyTag}, kFromAnybody | kAnyTag}) {
      Bytes program = {op(MessageStep::kReceive), how, size};
      envelope(program, 1, static_cast<std::uint8_t>(size <= 2 ? size | 8 : size));
      for (int i = 0; i < 16; ++i) program.insert(program.end(), {op(MessageStep::kData), 0, 0});
      corpus.add("point_to_point", "receive_" + std::to_string(size) + "_" + std::to_string(how), program);
    }
  }
  for (const std::uint8_t size : {0, 2, 5, 7}) {
    Bytes program = {op(MessageStep::kSend), 0, size};
    answer(program, wire::MessageType::kInvite, 1, 0, 2);
    for (int i = 0; i < 4; ++i) program.insert(program.end(), {op(MessageStep::kSent), 0});
    answer(program, wire::MessageType::kAccept, 1, 0, 0);
    corpus.add("point_to_point", "send_" + std::to_string(size), program);
    Bytes closed = {op(MessageStep::kSend), 0, size};
    answer(closed, wire::MessageType::kInvite, 1, 0, 1);
    answer(closed, wire::MessageType::kClose, 1, 0, 0);
    closed.insert(closed.end(), {op(MessageStep::kTick), 60, op(MessageStep::kTick), 60});
    corpus.add("point_to_point", "closed_" + std::to_string(size), closed);
  }
  Bytes own = {op(MessageStep::kSend), 2, 6, op(MessageStep::kReceive), 2, 6};
  corpus.add("point_to_point", "own", own);
  Bytes flood;
  for (std::uint8_t i = 0; i < 12; ++i) envelope(flood, i, 8 | 1);
  flood.insert(flood.end(), {op(MessageStep::kCloseGroup), 0});
  corpus.add("point_to_point", "flood", flood);
  Bytes lost = {op(MessageStep::kReceive), 0, 7};
  envelope(lost, 1, 7);
  lost.insert(lost.end(), {op(MessageStep::kData), 0, 0, op(MessageStep::kLost), 0});
  corpus.add("point_to_point", "lost", lost);
}

/// As fuzz_worker_engine reads them: each operation announced, granted, its Results, and a loss in the middle.
void add_workers(const Corpus& corpus) {
  const auto step = [](WorkerStep what) { return static_cast<std::uint8_t>(what); };
  for (const std::uint8_t setup : {0, 1, 2, 1 | kSetupFailover, 2 | kSetupFailover | kSetupRetain}) {
    for (const std::uint8_t kind : {0, 1, 2, 3, 16, +kKindApart, kKindApart | 16}) {
      Bytes program = {setup, step(WorkerStep::kSubmit), 1, kind, 6};
      for (std::uint8_t i = 0; i < 3; ++i) {
        program.insert(program.end(), {step(WorkerStep::kControl), i, 0, 0, 2, 0, step(WorkerStep::kSent), 0});
      }
      Bytes lost = program;
      lost.insert(lost.end(), {step(WorkerStep::kLost), 0, step(WorkerStep::kControl), 3, 0, 0, 1, 0});
      for (int i = 0; i < 8; ++i) {
        for (Bytes* one : {&program, &lost}) one->insert(one->end(), {step(WorkerStep::kResult), 0, 0});
      }
      program.insert(program.end(), {step(WorkerStep::kControl), 0, 3, 1, 2, 0, step(WorkerStep::kTick), 70});
      const std::string name = std::to_string(setup) + "_" + std::to_string(kind);
      corpus.add("worker_engine", "whole_" + name, program);
      corpus.add("worker_engine", "lost_" + name, lost);
    }
  }
}

/// As fuzz_rendezvous reads them: a job that begins, breaks, takes a server in, ends.
void add_rendezvous(const Corpus& corpus) {
  constexpr std::uint8_t kElastic = 8, kServer = 4, kPresent = 1, kIsLost = 24;
  const Bytes begin = {1 | 4, 1, 0, kElastic, 0, 1, 1, kElastic, 1, 1, 2, kServer, 0};
  Bytes breaks = begin;
  breaks.insert(breaks.end(), {kIsLost, 1, 2, 0, kElastic | kPresent, 0, 2, 2, kServer | kPresent, 0});
  Bytes planned = begin;
  planned.insert(planned.end(), {1, 3, kServer, 0, 6, 0, 2, 0, 6, 1, 2, 0, 7, 0, 1, 0, 7, 1, 1, 0});
  Bytes ends = begin;
  ends.insert(ends.end(), {4, 0, 64 | kPresent, 0, 0, 5, 2, 4, 1, 64 | kPresent, 0, 0, 5, 2, 5, 0, 1, 0, 5, 1, 1, 0});
  corpus.add("rendezvous", "begins", begin);
  corpus.add("rendezvous", "breaks", breaks);
  corpus.add("rendezvous", "planned", planned);
  corpus.add("rendezvous", "ends", ends);
}

/// As fuzz_checked reads them: sends that are confirmed by a report, receives that meet a whole and a damaged message.
void add_checked(const Corpus& corpus) {
  corpus.add("checked", "confirmed", Bytes{0, 16, 4, 0, 3, 8, 1, 2, 0, 0, 2, 0, 0, 0});
  corpus.add("checked", "received", Bytes{1, 17, 2, 0, 4, 1, 0, 1, 0, 0, 0});
  corpus.add("checked", "damaged",
             Bytes{1, 49, 2, 0, 4, 1, 0, 1, 0, 0, 2, 90, 1, 91, 1, 6, 100, 2, 0, 4, 1, 0, 1, 0, 0, 0});
  corpus.add("checked", "again", Bytes{0, 16, 4, 0, 3, 36, 1, 1, 1, 0, 1, 0, 0, 0, 6, 50, 4, 0});
}

}  // namespace
}  // namespace herring::fuzz

int main(int count, char** arguments) {
  if (count != 2) {
    std::cerr << "usage: make_corpus FOLDER\n";
    return 2;
  }
  const herring::fuzz::Corpus corpus{arguments[1]};
  herring::fuzz::add_headers(corpus);
  herring::fuzz::add_configs(corpus);
  herring::fuzz::add_programs(corpus);
  herring::fuzz::add_hub_frames(corpus);
  herring::fuzz::add_messages(corpus);
  herring::fuzz::add_workers(corpus);
  herring::fuzz::add_rendezvous(corpus);
  herring::fuzz::add_checked(corpus);
  return 0;
}
