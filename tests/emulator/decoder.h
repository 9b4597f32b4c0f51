// Statements to instructions. Each family of instructions has a function that knows its own.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "emulator/program.h"
#include "emulator/ptx_parser.h"

namespace oscar::emulator {

// "s32": kind 's', 32 bits; "bf16x2": kind 'e', packed; "pred": kind 'p'.
struct Type {
  char kind = 0;  // s, u, b, f, e (bf16), p (predicate), 8 (other formats); 0: no type
  int bits = 0;   // of an element
  bool packed = false;
  int bytes() const { return (packed ? 2 : 1) * bits / 8; }
  bool is(char k, int b) const { return kind == k && bits == b && !packed; }
  bool whole() const { return kind == 's' || kind == 'u' || kind == 'b'; }
};
Type ParseType(std::string_view text);

class Decoder {
 public:
  Decoder(Body& body, Program& program, std::string* error);
  bool Decode();

  // The last part of the statement's name that is a type; of two types, the first is the result's.
  Type LastType() const;
  Type FirstType() const;

  // Where an operand of the statement lies. Immediates and addresses of variables become constants.
  uint32_t Place(size_t operand, int bytes) { return PlaceOf(operand_at(operand), bytes); }
  uint32_t PlaceOf(const Operand& operand, int bytes);
  uint32_t Predicate(size_t operand) { return PlaceOf(operand_at(operand), 0); }
  // Bytes per lane of a register operand; `otherwise` for immediates and symbols.
  int BytesOf(const Operand& operand, int otherwise) const;
  // The base of an address goes to `place`, 8 bytes per lane or 4 by the result; the offset to
  // in->imm.
  int Address(size_t operand, uint32_t* place);
  // A list of places for an instruction with many.
  const uint32_t* List(const std::vector<uint32_t>& places);
  bool Immediate(size_t operand, uint64_t* bits) const;

  bool Fail(const std::string& what);
  const Statement& statement() const { return *statement_; }
  const Operand& operand_at(size_t i) const;
  size_t operands() const { return statement_->operands.size(); }
  std::string_view part(size_t i) const {
    return i < statement_->op.size() ? statement_->op[i] : std::string_view();
  }
  bool Has(std::string_view part) const { return statement_->Has(part); }
  Body& body() { return body_; }
  Instruction* in = nullptr;

 private:
  uint32_t ConstantPlace(int bytes, uint64_t bits);
  uint32_t NewPlace(int bytes);
  void AssignRegisters();

  Body& body_;
  Program& program_;
  std::string* error_;
  const Statement* statement_ = nullptr;
  std::vector<uint32_t> place_;  // of registers
  std::map<std::pair<int, uint64_t>, uint32_t> constants_;
};

// True where the statement is of the family; in->run is null then if `d` has failed.
bool DecodeControl(Decoder& d);
bool DecodeMove(Decoder& d);
bool DecodeInteger(Decoder& d);
bool DecodeFloat(Decoder& d);
bool DecodeHalf(Decoder& d);
bool DecodeCompare(Decoder& d);
bool DecodeConvert(Decoder& d);
bool DecodeMemory(Decoder& d);
bool DecodeAsync(Decoder& d);
bool DecodeWarp(Decoder& d);
bool DecodeTensor(Decoder& d);

// Reads and decodes a kernel.
bool MakeProgram(const Module& module, const Function& kernel, Program* program,
                 std::string* error);

}  // namespace oscar::emulator
