#include "intra_node/local_message.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "intra_node/pieces.h"

namespace herring::intra_node {
namespace {

constexpr std::uint8_t kVersion = 3;
constexpr std::uint8_t kReplyFlag = 1;
constexpr std::uint8_t kPatientFlag = 2;
constexpr std::size_t kMaxTextBytes = 1024;

struct Head {
  std::uint8_t version;
  std::uint8_t kind;
  std::uint8_t flags;
  std::uint8_t detail;
  std::uint32_t group;
  std::uint64_t op;
  std::uint32_t part;
  std::uint32_t reserved;
  std::uint32_t count;
  std::uint32_t zero;
};
static_assert(sizeof(Head) == 32 && offsetof(Head, op) == 8 && offsetof(Head, count) == 24);

struct ReadyBody {
  std::uint64_t layout;
  std::uint64_t offset;
  std::uint8_t collective;
  std::uint8_t dtype;
  std::uint8_t reduce;
  std::uint8_t dims;
  std::uint32_t root;
  std::uint64_t op_bytes;
  std::uint64_t part_bytes;
  std::uint64_t shape[kMaxDims];
};
static_assert(sizeof(ReadyBody) == 104 && offsetof(ReadyBody, shape) == 40);
static_assert(sizeof(Head) + sizeof(ReadyBody) == sizeof(ReadyToAll::tail));

struct ToAllHead {
  std::uint8_t version;
  std::uint8_t kind;
  std::uint8_t zero[6];
  std::uint64_t digest;
};
static_assert(sizeof(ToAllHead) == sizeof(ReadyToAll::head));

struct PackedKey {
  std::uint64_t op;
  std::uint32_t group;
  std::uint32_t part;
  std::uint64_t zero;
};
static_assert(sizeof(PackedKey) == 24);

/// Fills a message whose size is known.
class Writer {
 public:
  Writer(const Head& head, std::size_t body_bytes) : bytes_(sizeof(Head) + body_bytes) { put(head); }
  template <class T>
  void put(const T& value) {
    put_bytes(std::as_bytes(std::span(&value, 1)));
  }
  void put_bytes(std::span<const std::byte> bytes) {
    if (!bytes.empty()) std::memcpy(bytes_.data() + at_, bytes.data(), bytes.size());
    at_ += bytes.size();
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
  std::size_t at_ = 0;
};

template <class T>
T read(std::span<const std::byte> bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

ReadyBody pack(const LocalMessage& message) {
  ReadyBody body{};
  const OpDescriptor& d = message.descriptor;
  body.layout = message.layout;
  body.offset = message.offset;
  body.collective = static_cast<std::uint8_t>(d.collective);
  body.dtype = static_cast<std::uint8_t>(d.dtype);
  body.reduce = static_cast<std::uint8_t>(d.reduce);
  body.dims = d.dims;
  body.root = d.root;
  body.op_bytes = d.op_bytes;
  body.part_bytes = d.part_bytes;
  std::ranges::copy(d.shape, body.shape);
  return body;
}

bool unpack(const ReadyBody& body, LocalMessage& message) {
  OpDescriptor& d = message.descriptor;
  message.layout = body.layout;
  message.offset = body.offset;
  d.collective = static_cast<Collective>(body.collective);
  d.dtype = static_cast<DataType>(body.dtype);
  d.reduce = static_cast<ReduceOp>(body.reduce);
  d.dims = body.dims;
  d.root = body.root;
  d.op_bytes = body.op_bytes;
  d.part_bytes = body.part_bytes;
  std::ranges::copy(body.shape, d.shape.begin());
  return body.dims <= kMaxDims;
}

bool decode_ready(const Head& head, std::span<const std::byte> body, std::span<const std::byte> data,
                  LocalMessage& message) {
  if (head.detail > static_cast<std::uint8_t>(Location::kInline)) return false;
  message.location = static_cast<Location>(head.detail);
  message.is_patient = (head.flags & kPatientFlag) != 0;
  message.data = data;
  if (!unpack(read<ReadyBody>(body), message)) return false;
  const std::uint64_t expected = message.location == Location::kInline ? message.descriptor.part_bytes : 0;
  return message.data.size() == expected;
}

bool is_to_all(std::span<const std::byte> bytes) {
  return bytes.size() >= sizeof(ReadyToAll) && read<ToAllHead>(bytes).version == kVersion &&
         read<ToAllHead>(bytes).kind == static_cast<std::uint8_t>(MessageKind::kReadyToAll);
}

std::optional<LocalMessage> decode_to_all(std::span<const std::byte> bytes) {
  const auto tail = bytes.last(sizeof(ReadyToAll::tail));
  const auto head = read<Head>(tail);
  if (head.version != kVersion || head.kind != static_cast<std::uint8_t>(MessageKind::kReady)) return std::nullopt;
  LocalMessage message;
  message.key = {{head.group}, head.op, head.part};
  const auto data = bytes.subspan(sizeof(ReadyToAll::head), bytes.size() - sizeof(ReadyToAll));
  if (!decode_ready(head, tail.subspan(sizeof(Head)), data, message)) return std::nullopt;
  return message;
}

bool decode_done(const Head& head, std::span<const std::byte> rest, LocalMessage& message) {
  if (head.count == 0 || rest.size() != std::size_t{head.count} * sizeof(PackedKey)) return false;
  message.keys.reserve(head.count);
  for (; !rest.empty(); rest = rest.subspan(sizeof(PackedKey))) {
    const auto packed = read<PackedKey>(rest);
    message.keys.push_back({{packed.group}, packed.op, packed.part});
  }
  return true;
}

bool decode_error(const Head& head, std::span<const std::byte> rest, LocalMessage& message) {
  if (head.detail <= static_cast<std::uint8_t>(Code::kAgain) || head.detail > static_cast<std::uint8_t>(kLastCode) ||
      rest.size() > kMaxTextBytes) {
    return false;
  }
  message.code = static_cast<Code>(head.detail);
  message.reply = (head.flags & kReplyFlag) != 0;
  message.text.assign(reinterpret_cast<const char*>(rest.data()), rest.size());
  return true;
}

Head head_of(const LocalMessage& message) {
  Head head{};
  head.version = kVersion;
  head.kind = static_cast<std::uint8_t>(message.kind);
  head.group = message.key.group.value;
  head.op = message.key.op;
  head.part = message.key.part;
  return head;
}

std::array<std::byte, sizeof(ReadyToAll::tail)> encode_ready(const LocalMessage& ready) {
  Head head = head_of(ready);
  head.kind = static_cast<std::uint8_t>(MessageKind::kReady);
  head.flags = ready.is_patient ? kPatientFlag : 0;
  head.detail = static_cast<std::uint8_t>(ready.location);
  const ReadyBody body = pack(ready);
  std::array<std::byte, sizeof(ReadyToAll::tail)> bytes;
  std::memcpy(bytes.data(), &head, sizeof(head));
  std::memcpy(bytes.data() + sizeof(head), &body, sizeof(body));
  return bytes;
}

/// Every bit depends on every bit of the words, which mostly differ in a few low ones.
std::uint64_t digest_of(std::span<const std::byte> words) {
  std::uint64_t digest = 0;
  for (; !words.empty(); words = words.subspan(sizeof(digest))) {
    digest = (digest ^ read<std::uint64_t>(words)) * 0x9e3779b97f4a7c15ull;
    digest ^= digest >> 32;
  }
  return digest;
}

}  // namespace

ReadyToAll encode_to_all(const LocalMessage& ready) {
  ReadyToAll message;
  message.tail = encode_ready(ready);
  const ToAllHead head{kVersion, static_cast<std::uint8_t>(MessageKind::kReadyToAll), {}, digest_of(message.tail)};
  std::memcpy(message.head.data(), &head, sizeof(head));
  return message;
}

std::vector<std::byte> encode(const LocalMessage& message) {
  Head head = head_of(message);
  switch (message.kind) {
    case MessageKind::kReady:
      return join_pieces(encode_ready(message), message.data, {});
    case MessageKind::kReadyToAll: {
      const ReadyToAll ready = encode_to_all(message);
      return join_pieces(ready.head, message.data, ready.tail);
    }
    case MessageKind::kReduced:
      return Writer(head, 0).take();
    case MessageKind::kDone: {
      head.count = static_cast<std::uint32_t>(message.keys.size());
      Writer writer(head, message.keys.size() * sizeof(PackedKey));
      for (const OpKey& key : message.keys) {
        writer.put(PackedKey{key.op, key.group.value, key.part, 0});
      }
      return writer.take();
    }
    case MessageKind::kError: {
      head.detail = static_cast<std::uint8_t>(message.code);
      head.flags = message.reply ? kReplyFlag : 0;
      const auto text = std::as_bytes(std::span(message.text)).first(std::min(message.text.size(), kMaxTextBytes));
      Writer writer(head, text.size());
      writer.put_bytes(text);
      return writer.take();
    }
  }
  return {};
}

std::optional<LocalMessage> decode(std::span<const std::byte> bytes) {
  if (is_to_all(bytes)) return decode_to_all(bytes);
  if (bytes.size() < sizeof(Head)) return std::nullopt;
  const auto head = read<Head>(bytes);
  if (head.version != kVersion) return std::nullopt;
  LocalMessage message;
  message.kind = static_cast<MessageKind>(head.kind);
  message.key = {{head.group}, head.op, head.part};
  const auto rest = bytes.subspan(sizeof(Head));
  bool good = false;
  switch (message.kind) {
    case MessageKind::kReady:
      good = rest.size() >= sizeof(ReadyBody) && decode_ready(head, rest, rest.subspan(sizeof(ReadyBody)), message);
      break;
    case MessageKind::kReadyToAll:
      break;
    case MessageKind::kReduced:
      good = rest.empty();
      break;
    case MessageKind::kDone:
      good = decode_done(head, rest, message);
      break;
    case MessageKind::kError:
      good = decode_error(head, rest, message);
      break;
  }
  return good ? std::optional(std::move(message)) : std::nullopt;
}

}  // namespace herring::intra_node
