#include <mutex>
#include <utility>

#include "core/status.h"
#include "cuda/open.h"

namespace herring::cuda {
namespace {

struct PlugIn {
  std::mutex mutex;
  Opener opener;  // guarded by mutex
};

PlugIn& plug_in() {
  static auto* const one = new PlugIn();
  return *one;
}

}  // namespace

void set_plug_in(Opener opener) {
  const std::scoped_lock lock(plug_in().mutex);
  plug_in().opener = std::move(opener);
}

std::unique_ptr<Device> open_plug_in(DeviceId id) {
  Opener opener;
  {
    const std::scoped_lock lock(plug_in().mutex);
    opener = plug_in().opener;
  }
  if (!opener) throw Error(Code::kUnavailable, "Herring has no driver for devices of this kind");
  return opener(id);
}

}  // namespace herring::cuda
