// In the place of the wheel's header of this name, which needs those of NICs and GPUs: only the one enum that is in a memory's
// description is packed by the binding, in the same way, as a number.
#pragma once
#include <msgpack.hpp>

#include "mori/io/enum.hpp"
MSGPACK_ADD_ENUM(mori::io::MemoryLocationType);
