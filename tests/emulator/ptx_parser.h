// PTX text to statements. A module is scanned for its functions once; a kernel's body is read when
// it is first launched, with the functions it calls inlined.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "emulator/program.h"

namespace oscar::emulator {

struct Declared {
  std::string_view name;
  uint32_t bytes = 0, align = 1;
};

struct Function {
  std::string_view name;
  bool entry = false;
  std::vector<Declared> results, parameters;
  std::string_view body;
  int line = 0;
  int max_threads = 1024;
  uint32_t cluster = 0;
};

struct Variable {
  enum class Space { kGlobal, kConstant, kShared, kDynamicShared };
  Space space = Space::kGlobal;
  Declared declared;
  std::unique_ptr<std::byte[]> memory;  // kGlobal, kConstant
};

struct Module {
  std::map<std::string_view, Function> functions;  // those with a body
  std::map<std::string_view, Variable> variables;
};

// Fails with a sentence in `error`.
bool ScanModule(std::string_view text, Module* module, std::string* error);

// A kernel as statements over virtual registers. Branch targets are statement indices; every
// `ret` of an inlined function is a branch.
struct Body {
  std::vector<Statement> statements;
  std::vector<Register> registers;
  // What a symbol's address is, within its space.
  struct Place {
    enum class Space { kParameter, kLocal, kShared, kGlobal };
    Space space = Space::kGlobal;
    uint64_t address = 0;
  };
  // Symbols are per inlined call; operands hold keys into this map, made unique by the parser.
  std::map<std::string_view, Place> places;
  std::vector<std::unique_ptr<std::string>> names;  // that the parser made up
  std::map<int, Special> specials;                  // register -> what it holds
  uint32_t static_shared = 0, dynamic_align = 1, local_bytes = 0, parameter_bytes = 0;
  std::vector<Parameter> parameters;
};

bool ParseBody(const Module& module, const Function& kernel, Body* body, std::string* error);

}  // namespace oscar::emulator
