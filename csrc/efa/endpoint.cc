#include "efa/endpoint.h"

#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "efa/objects.h"
#include "efa/operation.h"
#include "efa/waiter.h"
#include "transport/limits.h"

namespace herring::efa {
namespace {

using transport::Completion;
using transport::CompletionKind;

using transport::kMaxOperations;
constexpr std::size_t kReadBatch = 32;
constexpr Duration kFirstPause = std::chrono::microseconds(100);
constexpr Duration kLongestPause = std::chrono::milliseconds(20);

/// Control messages travel without a tag: a provider may look for a tagged message's receive in all that are posted,
/// one by one, and the pool of receives for these would be in the way of every chunk. Everything but the tag is the
/// same.
bool is_untagged(Tag tag) { return tag == kControlTag; }

template <class Message>
Message make_message(Operation& operation, fi_addr_t address) {
  Message message{};
  message.msg_iov = operation.span.data();
  message.desc = operation.descriptor.data();
  message.iov_count = operation.spans;
  message.addr = address;
  message.context = &operation.context;
  if constexpr (std::is_same_v<Message, fi_msg_tagged>) message.tag = operation.tag.value;
  return message;
}

std::int64_t send_message(fid_ep* endpoint, Operation& operation) {
  const fi_addr_t to = operation.peer->address;
  if (is_untagged(operation.tag)) {
    const auto message = make_message<fi_msg>(operation, to);
    return fi_sendmsg(endpoint, &message, FI_COMPLETION);
  }
  const auto message = make_message<fi_msg_tagged>(operation, to);
  return fi_tsendmsg(endpoint, &message, FI_COMPLETION);
}

std::int64_t receive_message(fid_ep* endpoint, Operation& operation) {
  if (is_untagged(operation.tag)) {
    const auto message = make_message<fi_msg>(operation, FI_ADDR_UNSPEC);
    return fi_recvmsg(endpoint, &message, FI_COMPLETION);
  }
  const auto message = make_message<fi_msg_tagged>(operation, FI_ADDR_UNSPEC);
  return fi_trecvmsg(endpoint, &message, FI_COMPLETION);
}

/// Errors that say "this peer is gone or not there", as opposed to a fault of this endpoint.
bool is_peer_error(std::int64_t error) {
  switch (error) {
    case FI_ECANCELED:  // What the tcp provider gives the sends of a connection that broke.
    case FI_ECONNREFUSED:
    case FI_ECONNRESET:
    case FI_ECONNABORTED:
    case FI_ENOTCONN:
    case FI_ESHUTDOWN:
    case FI_EHOSTUNREACH:
    case FI_ENETUNREACH:
    case FI_EHOSTDOWN:
    case FI_ENETDOWN:
    case FI_ETIMEDOUT:
    case EPIPE:
    case FI_EIO:
      return true;
    default:
      return false;
  }
}

std::string hex(std::uint64_t value) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(value >> shift) & 15];
  const auto first = text.find_first_not_of('0');
  return "0x" + (first == std::string::npos ? "0" : text.substr(first));
}

class FabricEndpoint final : public transport::Endpoint {
 public:
  FabricEndpoint(std::shared_ptr<Card> card, ProviderKind kind, const CardMemory& memory, const FabricOptions& options);
  ~FabricEndpoint() override;

  const transport::Address& address() const override { return address_; }
  std::string description() const override { return description_; }
  void add_peer(PeerId id, std::span<const std::byte> address) override;
  void remove_peer(PeerId id) override;
  memory::Domain* memory() const override { return memory_.domain; }
  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override;
  bool takes_sends() const override { return sends_ < transport::kMaxSends && operations_.has_room(); }
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override;
  void cancel_receive(Token token) override;
  std::size_t poll(std::span<Completion> completions) override;
  void wait(Instant deadline, std::span<const int> also) override;
  bool prepare_wait(std::vector<int>& descriptors, Instant& deadline) override;
  void wake() override { waiter_.wake(); }
  void shut_down() override;

 private:
  bool is_shut() const { return objects_.endpoint == nullptr; }
  static Status shut() { return Status(Code::kTransport, "the endpoint is shut down"); }
  Operation* prepare(Tag tag, std::span<const std::byte> first, std::span<const std::byte> second, Token token);
  Status attach_descriptors(Operation& operation) const;
  std::int64_t submit_send(Operation& operation);
  void queue_send(Peer& peer, Operation* operation, std::int64_t error);
  void retry_waiting(bool room);
  void retry_peer(Peer& peer, Instant now);
  void fail_waiting(Peer& peer, const std::string& why);
  Operation* pop_waiting(Peer& peer);
  void settle_send(Operation& operation);
  Completion complete(const fi_cq_tagged_entry& entry);
  bool read_error(Completion& completion);
  bool arm_queue();
  Completion failed_send(Operation& operation, std::int64_t error, const std::string& detail) const;
  Completion failed_receive(const Operation& operation, const fi_cq_err_entry& error, const std::string& detail) const;

  // Declared before the fabric objects: operations must still be there while the endpoint closes.
  OperationPool operations_{kMaxOperations};
  const CardMemory memory_;
  std::unordered_map<std::uint32_t, std::unique_ptr<Peer>> peers_;
  std::vector<std::unique_ptr<Peer>> retired_;  // Removed, while libfabric still holds sends to them.
  FabricObjects objects_;
  Waiter waiter_;
  transport::Address address_;
  std::string description_;
  bool can_disconnect_ = false;
  bool sticky_descriptor_ = false;
  Duration connect_timeout_;
  std::size_t sends_ = 0;
  std::vector<Peer*> waiting_;    // Peers with waiting sends.
  std::deque<Completion> ready_;  // Made by us, not by the queue.
};

FabricEndpoint::FabricEndpoint(std::shared_ptr<Card> card, ProviderKind kind, const CardMemory& memory,
                               const FabricOptions& options)
    : memory_(memory),
      objects_(std::move(card), kind, options.receives),
      waiter_(objects_.wait_descriptor),
      address_(encode_address(objects_.own_address)),
      description_(std::string(fabric_name(kind)) + " (libfabric " + objects_.card->library().version_text() + ", " +
                   objects_.info->domain_attr->name + ")"),
      // ofi_rxm closes the connection when the address goes; the tcp provider keeps it.
      can_disconnect_(kind == ProviderKind::kTcpOverRxm || kind == ProviderKind::kVerbs),
      // In 1.17 its fi_trywait does nothing, and the descriptor stays readable for ever; a blocking read resets it.
      sticky_descriptor_(kind == ProviderKind::kNet),
      connect_timeout_(duration_of(options.connect_timeout_s)) {}

FabricEndpoint::~FabricEndpoint() { shut_down(); }

void FabricEndpoint::shut_down() {
  if (is_shut()) return;
  // A last push: the tcp provider may hold a few completed small sends back until their socket has room.
  static_cast<void>(fi_cq_read(objects_.queue.get(), nullptr, 0));
  // From here on libfabric touches no memory of a pending post.
  objects_.endpoint.reset();
  operations_.for_each([](Operation& operation) {
    for (memory::Hold& hold : operation.holds) hold.reset();
  });
  // Nor does anybody ask the queue: without its endpoint libfabric 1.17 crashes there.
  waiter_.forget_queue();
  waiting_.clear();
  ready_.clear();
}

void FabricEndpoint::add_peer(PeerId id, std::span<const std::byte> bytes) {
  FabricAddress address = decode_peer_address(id, bytes, objects_.own_address);
  if (const auto found = peers_.find(id.value); found != peers_.end()) {
    if (found->second->name == address.name) return;
    remove_peer(id);
  }
  auto peer = std::make_unique<Peer>();
  peer->id = id;
  peer->text = to_string(address);
  const int inserted = fi_av_insert(objects_.addresses.get(), address.name.data(), 1, &peer->address, 0, nullptr);
  if (inserted != 1)
    objects_.card->fail("fi_av_insert for peer " + std::to_string(id.value) + " at " + peer->text, inserted);
  peer->name = std::move(address.name);
  peers_.emplace(id.value, std::move(peer));
}

void FabricEndpoint::remove_peer(PeerId id) {
  if (is_shut()) return;
  const auto found = peers_.find(id.value);
  if (found == peers_.end()) return;
  std::unique_ptr<Peer> peer = std::move(found->second);
  peers_.erase(found);
  peer->removed = true;
  fail_waiting(*peer, "peer " + std::to_string(id.value) + " at " + peer->text + " was removed");
  std::erase(waiting_, peer.get());
  // With tcp the address stays: the provider's connection refers to it, and removing it would not close that.
  if (can_disconnect_) static_cast<void>(fi_av_remove(objects_.addresses.get(), &peer->address, 1, 0));
  if (peer->in_provider > 0) retired_.push_back(std::move(peer));
}

Operation* FabricEndpoint::prepare(Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                                   Token token) {
  Operation* operation = operations_.take();
  if (operation == nullptr) return nullptr;
  operation->token = token;
  operation->tag = tag;
  operation->bytes = first.size() + second.size();
  operation->spans = 0;
  for (const auto span : {first, second}) {
    if (span.empty()) continue;
    const std::size_t i = operation->spans++;
    // iovec has no const; sends are not written to.
    operation->span[i] = {const_cast<std::byte*>(span.data()), span.size()};
    operation->descriptor[i] = nullptr;
  }
  return operation;
}

/// Whoever posts memory holds it in the domain.
Status FabricEndpoint::attach_descriptors(Operation& operation) const {
  if (memory_.domain == nullptr) return Status::ok();
  for (std::size_t i = 0; i < operation.spans; ++i) {
    const iovec& span = operation.span[i];
    operation.holds[i] = memory_.domain->borrow({static_cast<const std::byte*>(span.iov_base), span.iov_len});
    const memory::Registration* const known = operation.holds[i].registration(memory_.nic);
    if (known == nullptr) {
      return Status(Code::kInternal, "a post of " + std::to_string(span.iov_len) +
                                         " bytes that are not registered: this is a bug in Herring, please report it");
    }
    operation.descriptor[i] = known->descriptor();
  }
  return Status::ok();
}

Status FabricEndpoint::post_send(PeerId to, Tag tag, std::span<const std::byte> first,
                                 std::span<const std::byte> second, Token token) {
  if (is_shut()) return shut();
  const auto found = peers_.find(to.value);
  if (found == peers_.end()) {
    return Status(Code::kInvalidArgument,
                  "post_send: peer " + std::to_string(to.value) + " is not known; add_peer() first");
  }
  Peer& peer = *found->second;
  // In the provider or waiting for it.
  if (!takes_sends() || !transport::takes_send(sends_, peer.in_provider + peer.waiting)) return Status::again();
  Operation* operation = prepare(tag, first, second, token);
  if (operation == nullptr) return Status::again();
  operation->peer = &peer;
  if (Status status = attach_descriptors(*operation); !status.is_ok()) {
    operations_.give_back(operation);
    return status;
  }
  const std::int64_t result = peer.waiting > 0 ? -FI_EAGAIN : submit_send(*operation);
  if (result == 0) {
    ++sends_;
    return Status::ok();
  }
  if (result == -FI_EAGAIN || is_peer_error(-result)) {
    queue_send(peer, operation, result);
    ++sends_;
    return Status::ok();
  }
  operations_.give_back(operation);
  return Status(Code::kTransport, "send of " + std::to_string(first.size() + second.size()) + " bytes to peer " +
                                      std::to_string(to.value) + " at " + peer.text + ": " +
                                      objects_.card->library().error_text(result));
}

std::int64_t FabricEndpoint::submit_send(Operation& operation) {
  const std::int64_t result = send_message(objects_.endpoint.get(), operation);
  if (result == 0) {
    operation.state = OperationState::kSend;
    ++operation.peer->in_provider;
  }
  return result;
}

void FabricEndpoint::queue_send(Peer& peer, Operation* operation, std::int64_t error) {
  operation->state = OperationState::kWaitingSend;
  (peer.last_waiting != nullptr ? peer.last_waiting->next : peer.first_waiting) = operation;
  peer.last_waiting = operation;
  if (peer.waiting++ > 0) return;
  peer.waiting_since = std::chrono::steady_clock::now();
  peer.pause = kFirstPause;
  peer.next_try = peer.waiting_since + peer.pause;
  peer.last_error = error;
  waiting_.push_back(&peer);
}

Operation* FabricEndpoint::pop_waiting(Peer& peer) {
  Operation* operation = peer.first_waiting;
  peer.first_waiting = operation->next;
  if (peer.first_waiting == nullptr) peer.last_waiting = nullptr;
  operation->next = nullptr;
  --peer.waiting;
  return operation;
}

void FabricEndpoint::fail_waiting(Peer& peer, const std::string& why) {
  const Status status(Code::kPeerLost, why);
  while (peer.first_waiting != nullptr) {
    Operation* operation = pop_waiting(peer);
    ready_.push_back({operation->token, CompletionKind::kSend, 0, status});
    --sends_;
    operations_.give_back(operation);
  }
}

/// `room`: a send completed, so a full queue may have room again: then everybody is tried at once.
void FabricEndpoint::retry_waiting(bool room) {
  const Instant now = std::chrono::steady_clock::now();
  for (Peer* peer : waiting_) {
    if (room || now >= peer->next_try) retry_peer(*peer, now);
  }
  std::erase_if(waiting_, [](const Peer* peer) { return peer->waiting == 0; });
}

void FabricEndpoint::retry_peer(Peer& peer, Instant now) {
  while (peer.first_waiting != nullptr) {
    const std::int64_t result = submit_send(*peer.first_waiting);
    if (result == 0) {
      pop_waiting(peer);
      peer.waiting_since = now;
      peer.pause = kFirstPause;
      continue;
    }
    if (result != -FI_EAGAIN) peer.last_error = result;
    if (result != -FI_EAGAIN && !is_peer_error(-result)) {
      Operation* operation = pop_waiting(peer);
      ready_.push_back(failed_send(*operation, -result, objects_.card->library().error_text(result)));
      --sends_;
      operations_.give_back(operation);
      continue;
    }
    if (now - peer.waiting_since >= connect_timeout_) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - peer.waiting_since).count();
      fail_waiting(peer, "peer " + std::to_string(peer.id.value) + " at " + peer.text + " took no message for " +
                             std::to_string(seconds) +
                             " s (last try: " + objects_.card->library().error_text(peer.last_error) +
                             "): has its process ended, or does a firewall block the port?");
      return;
    }
    peer.next_try = now + peer.pause;
    peer.pause = std::min(peer.pause * 2, kLongestPause);
    return;
  }
}

Status FabricEndpoint::post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) {
  if (is_shut()) return shut();
  Operation* operation = prepare(tag, first, second, token);
  if (operation == nullptr) return Status::again();
  if (Status status = attach_descriptors(*operation); !status.is_ok()) {
    operations_.give_back(operation);
    return status;
  }
  // Before the call: the provider may have the message already and complete it inside.
  operation->state = OperationState::kReceive;
  const std::int64_t result = receive_message(objects_.endpoint.get(), *operation);
  if (result == 0) return Status::ok();
  operations_.give_back(operation);
  if (result == -FI_EAGAIN) return Status::again();
  return Status(Code::kTransport, "receive of " + std::to_string(first.size() + second.size()) + " bytes, tag " +
                                      hex(tag.value) + ": " + objects_.card->library().error_text(result));
}

void FabricEndpoint::cancel_receive(Token token) {
  if (is_shut()) return;
  Operation* operation = operations_.find_receive(token);
  if (operation == nullptr || operation->cancel_requested) return;
  operation->cancel_requested = true;
  // The answer does not matter: the provider completes the receive as cancelled, or it is too late and the message
  // comes.
  static_cast<void>(fi_cancel(&objects_.endpoint->fid, &operation->context));
}

std::size_t FabricEndpoint::poll(std::span<Completion> completions) {
  if (is_shut()) return 0;
  std::size_t count = 0;
  bool room = false;
  std::size_t strays = 0;
  std::array<fi_cq_tagged_entry, kReadBatch> entries;
  while (count < completions.size()) {
    const std::size_t wanted = std::min(entries.size(), completions.size() - count);
    const auto found = fi_cq_read(objects_.queue.get(), entries.data(), wanted);
    if (found == -FI_EAVAIL) {
      if (!read_error(completions[count])) {
        if (++strays >= kReadBatch) break;
        continue;
      }
    } else if (found <= 0) {
      break;
    }
    const std::size_t first = count;
    if (found < 0) ++count;
    for (std::size_t i = 0; found > 0 && i < static_cast<std::size_t>(found); ++i) {
      completions[count++] = complete(entries[i]);
    }
    for (std::size_t i = first; i < count; ++i) room = room || completions[i].kind == CompletionKind::kSend;
    if (found > 0 && static_cast<std::size_t>(found) < wanted) break;
  }
  if (!waiting_.empty()) retry_waiting(room);
  for (; count < completions.size() && !ready_.empty(); ++count) {
    completions[count] = std::move(ready_.front());
    ready_.pop_front();
  }
  if (count > 0) waiter_.reset_naps();
  return count;
}

Completion FabricEndpoint::complete(const fi_cq_tagged_entry& entry) {
  auto& operation = *static_cast<Operation*>(entry.op_context);
  Completion completion{operation.token, CompletionKind::kReceive, entry.len, {}};
  if (operation.state == OperationState::kSend) {
    completion.kind = CompletionKind::kSend;
    completion.bytes = 0;
    if (operation.peer->removed) {
      completion.status = Status(Code::kPeerLost, "peer " + std::to_string(operation.peer->id.value) + " was removed");
    }
    settle_send(operation);
  }
  operations_.give_back(&operation);
  return completion;
}

/// Takes one entry from the error queue. False where there was none, or it belongs to no post of ours.
bool FabricEndpoint::read_error(Completion& completion) {
  // Newer libraries know larger entries; room to spare in case one writes past the fields that we know.
  struct {
    fi_cq_err_entry entry;
    std::array<std::byte, 64> spare;
  } error{};
  if (fi_cq_readerr(objects_.queue.get(), &error.entry, 0) <= 0 || error.entry.op_context == nullptr) return false;
  auto& operation = *static_cast<Operation*>(error.entry.op_context);
  std::array<char, 128> text{};
  const char* provider_text =
      fi_cq_strerror(objects_.queue.get(), error.entry.prov_errno, error.entry.err_data, text.data(), text.size());
  std::string detail = objects_.card->library().error_text(error.entry.err);
  if (provider_text != nullptr && *provider_text != '\0' && detail != provider_text) {
    detail += std::string(" (") + provider_text + ")";
  }
  if (operation.state == OperationState::kSend) {
    completion = failed_send(operation, error.entry.err, detail);
    settle_send(operation);
  } else {
    completion = failed_receive(operation, error.entry, detail);
  }
  operations_.give_back(&operation);
  return true;
}

Completion FabricEndpoint::failed_send(Operation& operation, std::int64_t error, const std::string& detail) const {
  const Peer& peer = *operation.peer;
  const Code code = peer.removed || is_peer_error(error) ? Code::kPeerLost : Code::kTransport;
  std::string text = "send of " + std::to_string(operation.bytes) + " bytes, tag " + hex(operation.tag.value) +
                     ", to peer " + std::to_string(peer.id.value) + " at " + peer.text;
  if (peer.removed) {
    text += ": the peer was removed";
  } else if (error == FI_ECANCELED) {
    text += ": the connection broke";
  } else {
    text += ": " + detail;
  }
  return {operation.token, CompletionKind::kSend, 0, Status(code, std::move(text))};
}

Completion FabricEndpoint::failed_receive(const Operation& operation, const fi_cq_err_entry& error,
                                          const std::string& detail) const {
  if (error.err == FI_ECANCELED && operation.cancel_requested) {
    return {operation.token, CompletionKind::kCancelled, 0, {}};
  }
  std::string text = "receive of " + std::to_string(operation.bytes) + " bytes, tag " + hex(operation.tag.value) + ": ";
  Code code = Code::kTransport;
  if (error.err == FI_ETRUNC) {
    code = Code::kProtocol;
    text += "the message is longer";
  } else if (is_peer_error(error.err)) {
    code = Code::kPeerLost;
    text += "the sender's connection broke while the message arrived";
    if (error.err != FI_ECANCELED) text += ": " + detail;
  } else {
    text += detail;
  }
  return {operation.token, CompletionKind::kReceive, 0, Status(code, std::move(text))};
}

void FabricEndpoint::settle_send(Operation& operation) {
  Peer& peer = *operation.peer;
  --sends_;
  --peer.in_provider;
  if (peer.waiting > 0) peer.waiting_since = std::chrono::steady_clock::now();
  if (peer.removed && peer.in_provider == 0) {
    std::erase_if(retired_, [&peer](const auto& owned) { return owned.get() == &peer; });
  }
}

void FabricEndpoint::wait(Instant deadline, std::span<const int> also) {
  if (!ready_.empty()) return;
  // Waiting sends are tried again by the poll that follows.
  for (const Peer* peer : waiting_) deadline = std::min(deadline, peer->next_try);
  waiter_.wait(deadline, also, waiter_.watches_queue() && !arm_queue());
}

bool FabricEndpoint::prepare_wait(std::vector<int>& descriptors, Instant& deadline) {
  if (!ready_.empty()) return false;
  for (const Peer* peer : waiting_) deadline = std::min(deadline, peer->next_try);
  if (waiter_.watches_queue() && !arm_queue()) return false;
  return waiter_.prepare(descriptors, deadline);
}

/// Makes the queue's descriptor silent until something new happens. False where there is something to poll already.
bool FabricEndpoint::arm_queue() {
  if (sticky_descriptor_) return fi_cq_sread(objects_.queue.get(), nullptr, 0, nullptr, 1) == -FI_EAGAIN;
  fid* watched = &objects_.queue->fid;
  return fi_trywait(objects_.card->fabric(), &watched, 1) == 0;
}

}  // namespace

std::unique_ptr<transport::Endpoint> open_endpoint(std::shared_ptr<Card> card, ProviderKind kind,
                                                   const CardMemory& memory, const FabricOptions& options) {
  return std::make_unique<FabricEndpoint>(std::move(card), kind, memory, options);
}

}  // namespace herring::efa
