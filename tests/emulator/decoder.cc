#include "emulator/decoder.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "emulator/register_slots.h"

namespace oscar::emulator {

Type ParseType(std::string_view text) {
  if (text == "pred") return {'p', 1, false};
  if (text.starts_with("e4m3") || text.starts_with("e5m2")) {
    return {text[1] == '4' ? '4' : '5', 8, text.ends_with("x2")};
  }
  Type type;
  if (text.starts_with("bf16") || text.starts_with("tf32")) {
    type.kind = text[0] == 'b' ? 'e' : 't';
    text.remove_prefix(2);
  } else if (!text.empty() &&
             (text[0] == 's' || text[0] == 'u' || text[0] == 'b' || text[0] == 'f')) {
    type.kind = text[0];
    text.remove_prefix(1);
  } else {
    return {};
  }
  if (text.ends_with("x2")) {
    type.packed = true;
    text.remove_suffix(2);
  }
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), type.bits);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  switch (type.bits) {
    case 8:
    case 16:
    case 32:
    case 64:
    case 128:
      return type;
    default:
      return {};
  }
}

Decoder::Decoder(Body& body, Program& program, std::string* error)
    : body_(body), program_(program), error_(error) {}

bool Decoder::Fail(const std::string& what) {
  if (error_->empty()) {
    *error_ = fmt::format("PTX line {}: {}: {}", statement_->line, statement_->name, what);
  }
  in->run = nullptr;
  return true;
}

const Operand& Decoder::operand_at(size_t i) const {
  static const Operand kNone;
  return i < statement_->operands.size() ? statement_->operands[i] : kNone;
}

Type Decoder::LastType() const {
  for (size_t i = statement_->op.size(); i-- > 1;) {
    const Type type = ParseType(statement_->op[i]);
    if (type.kind != 0) return type;
  }
  return {};
}

Type Decoder::FirstType() const {
  for (size_t i = 1; i < statement_->op.size(); ++i) {
    const Type type = ParseType(statement_->op[i]);
    if (type.kind != 0) return type;
  }
  return {};
}

int Decoder::BytesOf(const Operand& operand, int otherwise) const {
  if (operand.kind != Operand::Kind::kRegister) return otherwise;
  return body_.registers[static_cast<size_t>(operand.reg)].bytes;
}

uint32_t Decoder::NewPlace(int bytes) {
  const auto size = static_cast<uint32_t>(bytes == 0 ? 4 : bytes * kLanes);
  const uint32_t align = bytes == 0 ? 4 : 64;
  const uint32_t at = (program_.register_bytes + align - 1) / align * align;
  program_.register_bytes = at + size;
  return at;
}

uint32_t Decoder::ConstantPlace(int bytes, uint64_t bits) {
  if (bytes > 0 && bytes < 8) bits &= (uint64_t{1} << (8 * bytes)) - 1;
  const auto [at, added] = constants_.try_emplace({bytes, bits}, 0);
  if (added) {
    at->second = NewPlace(bytes);
    program_.constants.push_back({at->second, bytes, bits});
  }
  return at->second;
}

uint32_t Decoder::PlaceOf(const Operand& operand, int bytes) {
  // Immediates of byte-wide instructions live in registers of 16 bits, as bytes themselves do.
  const int width = bytes == 1 ? 2 : bytes;
  switch (operand.kind) {
    case Operand::Kind::kRegister: {
      const int have = body_.registers[static_cast<size_t>(operand.reg)].bytes;
      if (have != width) {
        Fail(fmt::format("an operand of {} bytes where {} are needed", have, width));
        return 0;
      }
      if (operand.negated) Fail("a negated operand");
      return place_[static_cast<size_t>(operand.reg)];
    }
    case Operand::Kind::kImmediate:
      return ConstantPlace(width, operand.bits);
    case Operand::Kind::kSymbol:
      return ConstantPlace(
          width, body_.places[operand.symbol].address + static_cast<uint64_t>(operand.offset));
    default:
      Fail("an operand of another kind was expected");
      return 0;
  }
}

int Decoder::Address(size_t operand, uint32_t* place) {
  const Operand& address = operand_at(operand);
  if (address.kind != Operand::Kind::kAddress) {
    Fail("an address was expected");
    return 8;
  }
  in->imm = address.offset;
  if (address.reg >= 0) {
    const int bytes = body_.registers[static_cast<size_t>(address.reg)].bytes;
    if (bytes != 4 && bytes != 8) Fail("an address of neither 32 nor 64 bits");
    *place = place_[static_cast<size_t>(address.reg)];
    return bytes;
  }
  const uint64_t base = address.symbol.empty() ? 0 : body_.places[address.symbol].address;
  *place = ConstantPlace(8, base);
  return 8;
}

const uint32_t* Decoder::List(const std::vector<uint32_t>& places) {
  auto list = std::make_unique<uint32_t[]>(places.size());
  std::copy(places.begin(), places.end(), list.get());
  program_.lists.push_back(std::move(list));
  return program_.lists.back().get();
}

bool Decoder::Immediate(size_t operand, uint64_t* bits) const {
  const Operand& o = operand_at(operand);
  if (o.kind != Operand::Kind::kImmediate) return false;
  *bits = o.bits;
  return true;
}

void Decoder::AssignRegisters() {
  program_.register_bytes = 64;  // place 0 means none
  const std::vector<int> slots = AssignSlots(body_);
  place_.assign(body_.registers.size(), 0);
  std::map<std::pair<int, int>, uint32_t> places;
  // Predicates lie together, the others behind them.
  for (const bool predicates : {true, false}) {
    for (size_t r = 0; r < place_.size(); ++r) {
      const int bytes = body_.registers[r].bytes;
      if ((bytes == 0) != predicates || slots[r] < 0) continue;
      const auto [at, added] = places.try_emplace({bytes, slots[r]}, 0);
      if (added) at->second = NewPlace(bytes);
      place_[r] = at->second;
    }
  }
  for (const auto& [reg, which] : body_.specials) {
    program_.special[static_cast<int>(which)] = place_[static_cast<size_t>(reg)];
  }
}

bool Decoder::Decode() {
  AssignRegisters();
  program_.code.resize(body_.statements.size());
  program_.names.reserve(body_.statements.size());
  for (size_t i = 0; i < body_.statements.size(); ++i) {
    const Statement& s = body_.statements[i];
    statement_ = &s;
    in = &program_.code[i];
    in->line = static_cast<uint32_t>(s.line);
    program_.names.emplace_back(s.name);
    if (s.guard >= 0) {
      in->guard = place_[static_cast<size_t>(s.guard)];
      in->guarded = s.guard_negated ? 2 : 1;
    }
    const bool known = DecodeControl(*this) || DecodeMove(*this) || DecodeMemory(*this) ||
                       DecodeAsync(*this) || DecodeWarp(*this) || DecodeTensor(*this) ||
                       DecodeConvert(*this) || DecodeCompare(*this) || DecodeHalf(*this) ||
                       DecodeFloat(*this) || DecodeInteger(*this);
    if (!known || in->run == nullptr) {
      Fail("not implemented by the emulator");
      return false;
    }
    if (!error_->empty()) return false;
  }
  return true;
}

bool MakeProgram(const Module& module, const Function& kernel, Program* program,
                 std::string* error) {
  Body body;
  if (!ParseBody(module, kernel, &body, error)) return false;
  program->name = kernel.name;
  program->static_shared = body.static_shared;
  program->local_bytes = (body.local_bytes + 15) / 16 * 16;
  program->parameter_bytes = body.parameter_bytes;
  program->parameters = body.parameters;
  program->max_threads = kernel.max_threads;
  program->cluster = kernel.cluster;
  return Decoder(body, *program, error).Decode();
}

}  // namespace oscar::emulator
