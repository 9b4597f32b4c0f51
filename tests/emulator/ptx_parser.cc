#include "emulator/ptx_parser.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "emulator/ptx_lexer.h"

namespace oscar::emulator {

namespace {

uint32_t AlignUp(uint32_t value, uint32_t align) { return (value + align - 1) / align * align; }

// ".b32" -> 4; 0 for predicates, -1 for what is no type.
int TypeBytes(std::string_view type) {
  static const std::map<std::string_view, int> kBytes = {
      {".pred", 0}, {".b8", 1},  {".u8", 1},    {".s8", 1},    {".b16", 2},
      {".u16", 2},  {".s16", 2}, {".f16", 2},   {".bf16", 2},  {".b32", 4},
      {".u32", 4},  {".s32", 4}, {".f32", 4},   {".b64", 8},   {".u64", 8},
      {".s64", 8},  {".f64", 8}, {".f16x2", 4}, {".b128", 16}, {".bf16x2", 4}};
  const auto found = kBytes.find(type);
  return found == kBytes.end() ? -1 : found->second;
}

// What parses declarations, in modules and bodies alike.
class Reader {
 public:
  Reader(std::string_view text, int line, std::string* error) : lexer_(text, line), error_(error) {}

 protected:
  bool Fail(const std::string& what) {
    if (error_->empty()) {
      *error_ = fmt::format("PTX line {}: {} (at '{}')", lexer_.line(), what,
                            lexer_.token().text.substr(0, 40));
    }
    return false;
  }
  bool Accept(char sign) {
    if (!lexer_.token().Is(sign)) return false;
    lexer_.Advance();
    return true;
  }
  bool Expect(char sign) { return Accept(sign) || Fail(fmt::format("expected '{}'", sign)); }
  bool Number(uint64_t* bits) {
    const bool negative = Accept('-');
    if (!ParseNumber(lexer_.token().text, bits)) return Fail("expected a number");
    if (negative) *bits = uint64_t{0} - *bits;
    lexer_.Advance();
    return true;
  }
  // Behind a state space: ".align 4 .b8 name[12]". An empty pair of brackets gives 0 bytes.
  bool Declaration(Declared* out) {
    int element = -1;
    bool aligned = false;
    while (lexer_.token().kind == Token::Kind::kName && lexer_.token().text[0] == '.') {
      if (lexer_.token().Is(".align")) {
        lexer_.Advance();
        uint64_t align = 0;
        if (!Number(&align)) return false;
        out->align = static_cast<uint32_t>(align);
        aligned = true;
        continue;
      }
      const int bytes = TypeBytes(lexer_.token().text);
      if (bytes >= 0) element = bytes;
      lexer_.Advance();  // .ptr, .attribute and their like say nothing here
    }
    if (element < 0) return Fail("expected a type");
    if (!aligned) out->align = static_cast<uint32_t>(std::max(1, element));
    out->name = lexer_.token().text;
    lexer_.Advance();
    out->bytes = static_cast<uint32_t>(element);
    while (Accept('[')) {
      uint64_t count = 0;
      if (!lexer_.token().Is(']') && !Number(&count)) return false;
      out->bytes *= static_cast<uint32_t>(count);
      if (!Expect(']')) return false;
    }
    return true;
  }

  Lexer lexer_;
  std::string* error_;
};

class ModuleReader : Reader {
 public:
  ModuleReader(std::string_view text, Module* module, std::string* error)
      : Reader(text, 1, error), module_(module) {}

  bool Read() {
    while (lexer_.token().kind != Token::Kind::kEnd) {
      const Token token = lexer_.token();
      if (token.Is(".version") || token.Is(".address_size") || token.Is(".target")) {
        lexer_.Advance();
        lexer_.Advance();
        while (Accept(',')) lexer_.Advance();
      } else if (token.Is(".visible") || token.Is(".extern") || token.Is(".weak") ||
                 token.Is(".common")) {
        extern_ = token.Is(".extern");
        lexer_.Advance();
        continue;
      } else if (token.Is(".entry") || token.Is(".func")) {
        if (!ReadFunction(token.Is(".entry"))) return false;
      } else if (token.Is(".global") || token.Is(".const") || token.Is(".shared")) {
        lexer_.Advance();
        if (!ReadVariable(token.text)) return false;
      } else {
        return Fail("unknown directive");
      }
      extern_ = false;
    }
    return true;
  }

 private:
  bool ReadParameters(std::vector<Declared>* out) {
    if (!Expect('(')) return false;
    while (!lexer_.token().Is(')')) {
      if (!lexer_.token().Is(".param")) return Fail("expected .param");
      lexer_.Advance();
      Declared declared;
      if (!Declaration(&declared)) return false;
      out->push_back(declared);
      Accept(',');
    }
    return Expect(')');
  }

  bool ReadFunction(bool entry) {
    lexer_.Advance();
    Function function;
    function.entry = entry;
    if (!entry && lexer_.token().Is('(') && !ReadParameters(&function.results)) return false;
    function.name = lexer_.token().text;
    lexer_.Advance();
    if (lexer_.token().Is('(') && !ReadParameters(&function.parameters)) return false;
    while (!lexer_.token().Is('{') && !lexer_.token().Is(';')) {
      if (lexer_.token().kind == Token::Kind::kEnd) return Fail("a function without a body");
      if (lexer_.token().Is(".maxntid")) {
        uint64_t threads = 1, factor = 0;
        do {
          lexer_.Advance();
          if (!Number(&factor)) return false;
          threads *= factor;
        } while (lexer_.token().Is(','));
        function.max_threads = static_cast<int>(threads);
        continue;
      }
      if (lexer_.token().Is(".reqnctapercluster")) {
        uint64_t blocks = 1, factor = 0;
        do {
          lexer_.Advance();
          if (!Number(&factor)) return false;
          blocks *= factor;
        } while (lexer_.token().Is(','));
        function.cluster = static_cast<uint32_t>(blocks);
        continue;
      }
      lexer_.Advance();
    }
    if (Accept(';')) return true;  // a prototype
    function.line = lexer_.line();
    function.body = lexer_.SkipBraces();
    module_->functions[function.name] = std::move(function);
    return true;
  }

  bool ReadVariable(std::string_view space) {
    Variable variable;
    if (!Declaration(&variable.declared)) return false;
    const uint32_t bytes = variable.declared.bytes;
    if (space == ".shared") {
      variable.space =
          extern_ && bytes == 0 ? Variable::Space::kDynamicShared : Variable::Space::kShared;
    } else {
      variable.space = space == ".const" ? Variable::Space::kConstant : Variable::Space::kGlobal;
      variable.memory = std::make_unique<std::byte[]>(bytes + 16);
      if (Accept('=') && !ReadValues(variable)) return false;
    }
    if (!Expect(';')) return false;
    module_->variables[variable.declared.name] = std::move(variable);
    return true;
  }

  // "{1, 2}" or "3". Every number is as wide as what the type before said: nvcc writes bytes, or
  // whole elements.
  bool ReadValues(const Variable& variable) {
    std::vector<uint64_t> values;
    if (Accept('{')) {
      while (!Accept('}')) {
        uint64_t value = 0;
        if (!Number(&value)) return false;
        values.push_back(value);
        Accept(',');
      }
    } else {
      uint64_t value = 0;
      if (!Number(&value)) return false;
      values.push_back(value);
    }
    // The element's width is the alignment's at most; arrays of bytes list bytes.
    const size_t width = values.size() * variable.declared.align <= variable.declared.bytes &&
                                 variable.declared.bytes / values.size() > 1
                             ? std::min<size_t>(8, variable.declared.bytes / values.size())
                             : 1;
    for (size_t i = 0; i < values.size(); ++i) {
      if ((i + 1) * width > variable.declared.bytes) return Fail("too many values");
      std::memcpy(variable.memory.get() + i * width, &values[i], width);
    }
    return true;
  }

  Module* module_;
  bool extern_ = false;
};

const std::map<std::string_view, Special>& SpecialNames() {
  static const std::map<std::string_view, Special> kNames = {
      {"%tid.x", Special::kTidX},
      {"%tid.y", Special::kTidY},
      {"%tid.z", Special::kTidZ},
      {"%ntid.x", Special::kNtidX},
      {"%ntid.y", Special::kNtidY},
      {"%ntid.z", Special::kNtidZ},
      {"%ctaid.x", Special::kCtaidX},
      {"%ctaid.y", Special::kCtaidY},
      {"%ctaid.z", Special::kCtaidZ},
      {"%nctaid.x", Special::kNctaidX},
      {"%nctaid.y", Special::kNctaidY},
      {"%nctaid.z", Special::kNctaidZ},
      {"%laneid", Special::kLaneId},
      {"%warpid", Special::kWarpId},
      {"%nwarpid", Special::kNwarpId},
      {"%smid", Special::kSmId},
      {"%nsmid", Special::kNsmId},
      {"%lanemask_eq", Special::kLaneMaskEq},
      {"%lanemask_lt", Special::kLaneMaskLt},
      {"%lanemask_le", Special::kLaneMaskLe},
      {"%lanemask_gt", Special::kLaneMaskGt},
      {"%lanemask_ge", Special::kLaneMaskGe},
      {"%dynamic_smem_size", Special::kDynamicSharedBytes},
      {"%cluster_ctarank", Special::kClusterRank},
      {"%cluster_nctarank", Special::kClusterSize}};
  return kNames;
}

// Names of one brace, and branches to labels it has not seen yet.
struct Scope {
  std::map<std::string_view, int> registers;
  struct Range {
    std::string_view prefix;
    int first = 0, count = 0;
  };
  std::vector<Range> ranges;
  std::map<std::string_view, std::string_view> symbols;  // to Body::places
  std::map<std::string_view, int> labels;
  std::vector<std::pair<int, std::string_view>> branches;
};

class BodyReader : Reader {
 public:
  BodyReader(const Module& module, const Function& function, Body* body, int depth,
             std::string* error)
      : Reader(function.body, function.line, error),
        module_(module),
        function_(function),
        body_(body),
        depth_(depth) {
    scopes_.emplace_back();
  }

  Scope& scope() { return scopes_.back(); }

  bool Read() {
    while (lexer_.token().kind != Token::Kind::kEnd) {
      if (!ReadStatement()) return false;
    }
    if (scopes_.size() != 1) return Fail("braces do not match");
    const int end = static_cast<int>(body_->statements.size());
    for (const int at : returns_) body_->statements[static_cast<size_t>(at)].target = end;
    if (!CloseScope()) return false;
    return true;
  }

 private:
  bool ReadStatement() {
    const Token& token = lexer_.token();
    if (Accept(';')) return true;
    if (Accept('{')) {
      scopes_.emplace_back();
      return true;
    }
    if (token.Is('}')) {
      lexer_.Advance();
      return CloseScope();
    }
    if (token.kind == Token::Kind::kName && lexer_.BeforeColon()) {
      scope().labels[token.text] = static_cast<int>(body_->statements.size());
      lexer_.Advance();
      lexer_.Advance();
      return true;
    }
    if (token.kind == Token::Kind::kName && token.text[0] == '.') return ReadDirective();
    return ReadInstruction();
  }

  bool CloseScope() {
    if (scopes_.empty()) return Fail("braces do not match");
    Scope closed = std::move(scopes_.back());
    scopes_.pop_back();
    for (const auto& [at, label] : closed.branches) {
      const auto found = closed.labels.find(label);
      if (found != closed.labels.end()) {
        body_->statements[static_cast<size_t>(at)].target = found->second;
      } else if (scopes_.empty()) {
        return Fail(fmt::format("no label {}", label));
      } else {
        scope().branches.emplace_back(at, label);
      }
    }
    return true;
  }

  bool ReadDirective() {
    const std::string_view name = lexer_.token().text;
    lexer_.Advance();
    if (name == ".reg") return ReadRegisters();
    if (name == ".pragma" || name == ".loc" || name == ".file") {
      while (!lexer_.token().Is(';') && lexer_.token().kind != Token::Kind::kEnd) lexer_.Advance();
      return Expect(';');
    }
    if (name == ".local" || name == ".shared" || name == ".param") {
      Declared declared;
      if (!Declaration(&declared)) return false;
      Body::Place place;
      if (name == ".shared") {
        body_->static_shared = AlignUp(body_->static_shared, declared.align);
        place = {Body::Place::Space::kShared, kSharedBase + body_->static_shared};
        body_->static_shared += declared.bytes;
      } else {
        place = {Body::Place::Space::kLocal, AllocateLocal(declared)};
      }
      AddSymbol(declared.name, place);
      return Expect(';');
    }
    return Fail("unknown directive");
  }

  uint32_t AllocateLocal(const Declared& declared) {
    body_->local_bytes = AlignUp(body_->local_bytes, std::max(8u, declared.align));
    const uint32_t at = body_->local_bytes;
    body_->local_bytes += declared.bytes;
    return at;
  }

 public:
  void AddSymbol(std::string_view name, Body::Place place) {
    body_->names.push_back(
        std::make_unique<std::string>(fmt::format("{}#{}", name, body_->places.size())));
    const std::string_view unique = *body_->names.back();
    body_->places[unique] = place;
    scope().symbols[name] = unique;
  }

 private:
  int NewRegister(int bytes) {
    body_->registers.push_back({bytes});
    return static_cast<int>(body_->registers.size()) - 1;
  }

  bool ReadRegisters() {
    int bytes = TypeBytes(lexer_.token().text);
    if (bytes < 0) return Fail("expected a type");
    lexer_.Advance();
    do {
      const std::string_view name = lexer_.token().text;
      lexer_.Advance();
      if (Accept('<')) {
        uint64_t count = 0;
        if (!Number(&count) || !Expect('>')) return false;
        const int first = static_cast<int>(body_->registers.size());
        for (uint64_t i = 0; i < count; ++i) NewRegister(bytes);
        scope().ranges.push_back({name, first, static_cast<int>(count)});
      } else {
        scope().registers[name] = NewRegister(bytes);
      }
    } while (Accept(','));
    return Expect(';');
  }

  // -1 where there is none of this name.
  int FindRegister(std::string_view name) {
    size_t digits = name.size();
    while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9') --digits;
    for (size_t s = scopes_.size(); s-- > 0;) {
      const Scope& in = scopes_[s];
      if (const auto found = in.registers.find(name); found != in.registers.end()) {
        return found->second;
      }
      if (digits == name.size()) continue;
      for (const Scope::Range& range : in.ranges) {
        if (range.prefix != name.substr(0, digits)) continue;
        uint64_t index = 0;
        if (ParseNumber(name.substr(digits), &index) &&
            index < static_cast<uint64_t>(range.count)) {
          return range.first + static_cast<int>(index);
        }
      }
    }
    const auto special = SpecialNames().find(name);
    if (special == SpecialNames().end()) return -1;
    for (const auto& [reg, which] : body_->specials) {
      if (which == special->second) return reg;
    }
    const int reg = NewRegister(4);
    body_->specials[reg] = special->second;
    return reg;
  }

  std::optional<std::string_view> FindSymbol(std::string_view name) {
    for (size_t s = scopes_.size(); s-- > 0;) {
      const auto found = scopes_[s].symbols.find(name);
      if (found != scopes_[s].symbols.end()) return found->second;
    }
    const auto variable = module_.variables.find(name);
    if (variable == module_.variables.end()) return std::nullopt;
    if (body_->places.find(name) == body_->places.end()) {
      const Variable& v = variable->second;
      Body::Place place{Body::Place::Space::kGlobal, reinterpret_cast<uint64_t>(v.memory.get())};
      if (v.space == Variable::Space::kShared) {
        body_->static_shared = AlignUp(body_->static_shared, v.declared.align);
        place = {Body::Place::Space::kShared, kSharedBase + body_->static_shared};
        body_->static_shared += v.declared.bytes;
      } else if (v.space == Variable::Space::kDynamicShared) {
        // Placed behind the static ones once all of them are known.
        place = {Body::Place::Space::kShared, 0};
        body_->dynamic_align = std::max(body_->dynamic_align, v.declared.align);
      }
      body_->places[name] = place;
    }
    return name;
  }

  bool ReadOperand(Operand* out) {
    if (Accept('[')) {
      out->kind = Operand::Kind::kAddress;
      Operand base;
      if (!ReadOperand(&base)) return false;
      if (base.kind == Operand::Kind::kRegister) out->reg = base.reg;
      if (base.kind == Operand::Kind::kSymbol) out->symbol = base.symbol;
      if (base.kind == Operand::Kind::kImmediate) out->offset = static_cast<int64_t>(base.bits);
      out->offset += base.offset;
      // Coordinates in a tensor.
      if (Accept(',') && !ReadOperand(&out->items.emplace_back())) return false;
      return Expect(']');
    }
    if (Accept('{')) {
      out->kind = Operand::Kind::kVector;
      while (!Accept('}')) {
        if (!ReadOperand(&out->items.emplace_back())) return false;
        Accept(',');
      }
      return true;
    }
    if (Accept('!')) out->negated = true;
    const Token token = lexer_.token();
    if (token.kind == Token::Kind::kNumber || token.Is('-')) {
      out->kind = Operand::Kind::kImmediate;
      return Number(&out->bits);
    }
    if (token.kind != Token::Kind::kName) return Fail("expected an operand");
    lexer_.Advance();
    if (token.text == "_") return true;
    if (token.text == "WARP_SZ") {
      out->kind = Operand::Kind::kImmediate;
      out->bits = kLanes;
      return true;
    }
    const int reg = FindRegister(token.text);
    if (reg >= 0) {
      out->kind = Operand::Kind::kRegister;
      out->reg = reg;
      if (Accept('|')) {
        out->second = FindRegister(lexer_.token().text);
        lexer_.Advance();
      }
    } else if (const auto symbol = FindSymbol(token.text)) {
      out->kind = Operand::Kind::kSymbol;
      out->symbol = *symbol;
    } else {
      return Fail(fmt::format("'{}' is neither a register nor a variable", token.text));
    }
    while (lexer_.token().Is('+') || lexer_.token().Is('-')) {
      const bool plus = Accept('+');
      uint64_t bits = 0;
      if (!Number(&bits)) return false;
      (void)plus;  // Number takes the minus sign itself
      out->offset += static_cast<int64_t>(bits);
    }
    return true;
  }

  bool ReadInstruction() {
    Statement s;
    s.line = lexer_.line();
    if (Accept('@')) {
      s.guard_negated = Accept('!');
      s.guard = FindRegister(lexer_.token().text);
      if (s.guard < 0) return Fail("expected a predicate");
      lexer_.Advance();
    }
    if (lexer_.token().kind != Token::Kind::kName) return Fail("expected an instruction");
    s.name = lexer_.token().text;
    std::string_view rest = s.name;
    while (!rest.empty()) {
      const size_t dot = rest.find('.');
      s.op.push_back(rest.substr(0, dot));
      rest.remove_prefix(dot == std::string_view::npos ? rest.size() : dot + 1);
    }
    lexer_.Advance();
    if (s.op[0] == "bra") {
      scope().branches.emplace_back(static_cast<int>(body_->statements.size()),
                                    lexer_.token().text);
      lexer_.Advance();
    } else if (s.op[0] == "call") {
      return ReadCall(s);
    } else if (s.op[0] == "ret" && depth_ > 0) {
      returns_.push_back(static_cast<int>(body_->statements.size()));
      s.op = {"bra"};
    } else {
      while (!lexer_.token().Is(';')) {
        if (lexer_.token().kind == Token::Kind::kEnd) return Fail("an instruction without an end");
        if (!ReadOperand(&s.operands.emplace_back())) return false;
        if (!Accept(',') && !lexer_.token().Is(';')) return Fail("expected ',' or ';'");
      }
    }
    body_->statements.push_back(std::move(s));
    return Expect(';');
  }

  bool ReadList(std::vector<Operand>* out) {
    if (!Expect('(')) return false;
    while (!Accept(')')) {
      if (!ReadOperand(&out->emplace_back())) return false;
      Accept(',');
    }
    return true;
  }

  bool ReadCall(const Statement& s) {
    if (s.guard >= 0) return Fail("a call under a predicate");
    std::vector<Operand> results, arguments;
    if (lexer_.token().Is('(')) {
      if (!ReadList(&results) || !Expect(',')) return false;
    }
    const std::string_view name = lexer_.token().text;
    const auto found = module_.functions.find(name);
    if (found == module_.functions.end()) return Fail("a call to a function that is not here");
    lexer_.Advance();
    if (Accept(',') && !ReadList(&arguments)) return false;
    if (!Expect(';')) return false;
    if (depth_ > 16) return Fail("calls too deep");
    const Function& callee = found->second;
    if (arguments.size() != callee.parameters.size() || results.size() != callee.results.size()) {
      return Fail("a call with the wrong number of arguments");
    }
    BodyReader inner(module_, callee, body_, depth_ + 1, error_);
    const auto bind = [&](const std::vector<Operand>& from, const std::vector<Declared>& to) {
      for (size_t i = 0; i < from.size(); ++i) {
        if (from[i].kind != Operand::Kind::kSymbol) return Fail("an argument that is no .param");
        inner.scope().symbols[to[i].name] = from[i].symbol;
      }
      return true;
    };
    return bind(arguments, callee.parameters) && bind(results, callee.results) && inner.Read();
  }

  const Module& module_;
  const Function& function_;
  Body* body_;
  int depth_;
  std::vector<Scope> scopes_;
  std::vector<int> returns_;
};

}  // namespace

bool ScanModule(std::string_view text, Module* module, std::string* error) {
  return ModuleReader(text, module, error).Read();
}

bool ParseBody(const Module& module, const Function& kernel, Body* body, std::string* error) {
  BodyReader reader(module, kernel, body, 0, error);
  for (const Declared& p : kernel.parameters) {
    body->parameter_bytes = AlignUp(body->parameter_bytes, p.align);
    reader.AddSymbol(p.name, {Body::Place::Space::kParameter, body->parameter_bytes});
    body->parameters.push_back({std::string(p.name), body->parameter_bytes, p.bytes});
    body->parameter_bytes += p.bytes;
  }
  if (!reader.Read()) return false;
  // A branch to the end needs something to land on.
  Statement end;
  end.op = {"exit"};
  end.name = "exit";
  body->statements.push_back(std::move(end));
  const uint32_t align = std::max(16u, body->dynamic_align);
  body->static_shared = AlignUp(body->static_shared + kSharedBase, align) - kSharedBase;
  for (auto& [name, place] : body->places) {
    if (place.space == Body::Place::Space::kShared && place.address == 0) {
      place.address = kSharedBase + body->static_shared;
    }
  }
  return true;
}

}  // namespace oscar::emulator
