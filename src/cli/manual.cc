// Hidden commands that write the man page and shell completions from the options as declared, so
// that neither can drift from the program.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <memory>
#include <set>

#include "cli/command.h"
#include "oscar/version.h"
#include "quant/kv_method.h"

namespace oscar::cli {
namespace {

struct OptionInfo {
  std::vector<std::string> names;  // "--port"; empty: positional
  std::string positional;
  std::string description, default_value, environment;
  bool takes_value = false;
  std::vector<std::string> values;  // where only these are accepted
};

struct CommandInfo {
  std::string path;  // "rotation convert"; empty: the program itself
  std::string description;
  std::vector<OptionInfo> options;
  std::vector<std::string> subcommands;
};

std::string OneLine(std::string text) {
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text;
}

// "TEXT:{debug,info}" -> debug, info.
std::vector<std::string> ValuesOf(const std::string& type) {
  std::vector<std::string> out;
  const size_t open = type.find('{'), close = type.find('}');
  if (open == std::string::npos || close == std::string::npos || close < open) return out;
  const std::string list = type.substr(open + 1, close - open - 1);
  for (size_t at = 0; at <= list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    if (end > at) out.push_back(list.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

void Collect(const CLI::App& app, const std::string& path, std::vector<CommandInfo>* out) {
  CommandInfo info;
  info.path = path;
  info.description = app.get_description();
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;
    OptionInfo o;
    for (const std::string& name : option->get_snames()) o.names.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) o.names.push_back("--" + name);
    if (o.names.empty()) o.positional = option->get_name(true);
    o.description = OneLine(option->get_description());
    o.default_value = option->get_default_str();
    o.environment = option->get_envname();
    o.takes_value = option->get_expected_max() > 0 && option->get_type_size() != 0;
    o.values = ValuesOf(option->get_type_name());
    if (o.names == std::vector<std::string>{"--kv"}) {
      for (const KvMethodInfo& method : KvMethodTable()) o.values.emplace_back(method.name);
    }
    info.options.push_back(std::move(o));
  }
  std::vector<const CLI::App*> subs;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!sub->get_group().empty()) subs.push_back(sub);
  }
  for (const CLI::App* sub : subs) info.subcommands.push_back(sub->get_name());
  out->push_back(std::move(info));
  for (const CLI::App* sub : subs) {
    Collect(*sub, path.empty() ? sub->get_name() : path + " " + sub->get_name(), out);
  }
}

std::string Join(const std::vector<std::string>& parts, std::string_view between) {
  std::string out;
  for (const std::string& part : parts) {
    if (!out.empty()) out += between;
    out += part;
  }
  return out;
}

// ------------------------------------------------------------------------------------ man page

std::string Roff(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else if ((c == '.' || c == '\'') && (out.empty() || out.back() == '\n')) {
      out += "\\&";
      out += c;
    } else {
      out += c;
    }
  }
  return out;
}

std::string ManPage(const std::vector<CommandInfo>& commands) {
  std::string out = fmt::format(
      ".TH OSCAR 1 \"\" \"oscar {}\" \"User Commands\"\n.SH NAME\noscar \\- serve and study large "
      "language models on a 2-bit KV cache\n.SH SYNOPSIS\n.B oscar\n.I COMMAND\n.RI [ OPTION ]...\n"
      ".SH DESCRIPTION\nRuns Qwen3 and Llama-3 checkpoints, as Hugging Face ships them, on a paged "
      "KV cache that keeps its history in two bits per element. Without\n.B \\-\\-model\nevery "
      "command "
      "takes the embedded demo model.\n",
      kVersion);
  const auto options = [&](const CommandInfo& command) {
    for (const OptionInfo& o : command.options) {
      out += ".TP\n";
      out += o.names.empty() ? fmt::format(".I {}\n", Roff(o.positional))
                             : fmt::format(".B {}{}\n", Roff(Join(o.names, ", ")),
                                           o.takes_value ? " \\fIVALUE\\fR" : "");
      out += Roff(o.description);
      if (!o.values.empty() && o.description.find(o.values.front()) == std::string::npos) {
        out += Roff(fmt::format(" ({})", Join(o.values, ", ")));
      }
      if (!o.default_value.empty()) out += Roff(fmt::format(" [{}]", o.default_value));
      out += '\n';
    }
  };
  out += ".SH OPTIONS\n";
  options(commands.front());
  out += ".SH COMMANDS\n";
  for (const CommandInfo& command : commands) {
    if (command.path.empty()) continue;
    out += fmt::format(".SS oscar {}\n{}.\n", Roff(command.path), Roff(command.description));
    options(command);
  }
  out +=
      ".SH ENVIRONMENT\nEvery long option is also a variable:\n.B \\-\\-kv\\-memory\nis\n.BR "
      "OSCAR_KV_MEMORY .\nThe command line wins.\n.TP\n.B OSCAR_DEMO_MODEL\nFolder of the demo "
      "model.\n.SH EXIT STATUS\n0 success, 1 failure, 2 wrong usage, 130 interrupted.\n.SH FILES\n"
      ".TP\n.I /usr/share/oscar/models/demo\nThe demo model.\n.TP\n.I /etc/default/oscar\nOptions "
      "of "
      "the system service, as variables.\n.SH EXAMPLES\n.TP\n.B oscar demo\nNumbers hidden in a "
      "long "
      "text, asked for on four caches.\n.TP\n.B oscar serve \\-\\-model "
      "~/models/Qwen3\\-8B\nAnswers "
      "OpenAI clients on http://127.0.0.1:8000/v1, with a page to talk to at /.\n";
  return out;
}

// ----------------------------------------------------------------------------------- completions

std::vector<std::string> NamesOf(const CommandInfo& command) {
  std::vector<std::string> names;
  for (const OptionInfo& o : command.options) {
    names.insert(names.end(), o.names.begin(), o.names.end());
  }
  return names;
}

std::string Bash(const std::vector<CommandInfo>& commands) {
  std::string out =
      "# bash completion for oscar\n_oscar() {\n"
      "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} path= i\n"
      "  for ((i = 1; i < COMP_CWORD; i++)); do\n    case \"$path ${COMP_WORDS[i]}\" in\n";
  for (const CommandInfo& command : commands) {
    if (command.path.empty()) continue;
    const size_t space = command.path.rfind(' ');
    const std::string parent = space == std::string::npos ? "" : command.path.substr(0, space);
    const std::string name = command.path.substr(space == std::string::npos ? 0 : space + 1);
    out += fmt::format("      \"{} {}\") path=\"{}\" ;;\n", parent, name, command.path);
  }
  out += "    esac\n  done\n  case \"$path $prev\" in\n";
  for (const CommandInfo& command : commands) {
    for (const OptionInfo& o : command.options) {
      if (o.values.empty()) continue;
      for (const std::string& name : o.names) {
        out +=
            fmt::format("    \"{} {}\") COMPREPLY=($(compgen -W \"{}\" -- \"$cur\")); return ;;\n",
                        command.path, name, Join(o.values, " "));
      }
    }
  }
  out += "  esac\n  local options= commands=\n  case \"$path\" in\n";
  for (const CommandInfo& command : commands) {
    out += fmt::format("    \"{}\") options=\"{}\" commands=\"{}\" ;;\n", command.path,
                       Join(NamesOf(command), " "), Join(command.subcommands, " "));
  }
  out +=
      "  esac\n  if [[ $cur == -* ]]; then\n    COMPREPLY=($(compgen -W \"$options\" -- "
      "\"$cur\"))\n"
      "  elif [[ -n $commands ]]; then\n    COMPREPLY=($(compgen -W \"$commands\" -- \"$cur\"))\n"
      "  fi\n}\ncomplete -o bashdefault -o default -F _oscar oscar\n";
  return out;
}

std::string Quoted(std::string_view text, std::string_view also) {
  std::string out;
  for (const char c : text) {
    if (c == '\'') {
      out += "'\\''";
    } else if (also.find(c) != std::string_view::npos) {
      out += '\\';
      out += c;
    } else {
      out += c;
    }
  }
  return out;
}

std::string Zsh(const std::vector<CommandInfo>& commands) {
  const auto function = [](const std::string& path) {
    std::string name = "_oscar" + (path.empty() ? "" : "_" + path);
    std::replace(name.begin(), name.end(), ' ', '_');
    return name;
  };
  std::string out = "#compdef oscar\n";
  for (const CommandInfo& command : commands) {
    out += fmt::format("{}() {{\n  local -a args\n  args=(\n", function(command.path));
    for (const OptionInfo& o : command.options) {
      for (const std::string& name : o.names) {
        const std::string value = !o.takes_value ? ""
                                  : o.values.empty()
                                      ? ":value:_files"
                                      : fmt::format(":value:({})", Join(o.values, " "));
        out += fmt::format("    '{}[{}]{}'\n", name, Quoted(o.description, "[]:"), value);
      }
    }
    if (command.subcommands.empty()) {
      out += "    '*:file:_files'\n  )\n  _arguments $args\n}\n";
      continue;
    }
    out +=
        "    '1: :->command'\n    '*:: :->rest'\n  )\n  local state line\n  _arguments -C $args\n";
    out += "  case $state in\n    command) local -a names; names=(";
    for (const CommandInfo& sub : commands) {
      const std::string prefix = command.path.empty() ? "" : command.path + " ";
      if (sub.path.empty() || sub.path == command.path || !sub.path.starts_with(prefix)) continue;
      const std::string name = sub.path.substr(prefix.size());
      if (name.find(' ') != std::string::npos) continue;
      out += fmt::format(" '{}:{}'", name, Quoted(OneLine(sub.description), ":"));
    }
    out += "); _describe command names ;;\n    rest) case $line[1] in\n";
    for (const std::string& sub : command.subcommands) {
      out += fmt::format("      {}) {} ;;\n", sub,
                         function(command.path.empty() ? sub : command.path + " " + sub));
    }
    out += "    esac ;;\n  esac\n}\n";
  }
  out += "_oscar \"$@\"\n";
  return out;
}

std::string Fish(const std::vector<CommandInfo>& commands) {
  std::string out = "# fish completion for oscar\n";
  for (const CommandInfo& command : commands) {
    // The first word of the path decides; nested commands share their options with it.
    const std::string first = command.path.substr(0, command.path.find(' '));
    const std::string when = command.path.empty()
                                 ? "__fish_use_subcommand"
                                 : fmt::format("__fish_seen_subcommand_from {}", first);
    for (const OptionInfo& o : command.options) {
      std::string names;
      for (const std::string& name : o.names) {
        names += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      if (names.empty()) continue;
      out += fmt::format("complete -c oscar -n '{}'{}{}{} -d '{}'\n", when, names,
                         o.takes_value ? " -r" : "",
                         o.values.empty() ? "" : fmt::format(" -a '{}'", Join(o.values, " ")),
                         Quoted(o.description, ""));
    }
    for (const CommandInfo& sub : commands) {
      const std::string prefix = command.path.empty() ? "" : command.path + " ";
      if (sub.path.empty() || sub.path == command.path || !sub.path.starts_with(prefix)) continue;
      const std::string name = sub.path.substr(prefix.size());
      if (name.find(' ') != std::string::npos) continue;
      out += fmt::format("complete -c oscar -n '{}' -f -a {} -d '{}'\n", when, name,
                         Quoted(OneLine(sub.description), ""));
    }
  }
  return out;
}

}  // namespace

void AddManualCommands(CLI::App& app, RunFunction& run) {
  const auto collect = [&app] {
    std::vector<CommandInfo> commands;
    Collect(app, "", &commands);
    return commands;
  };
  CLI::App* man = app.add_subcommand("man", "Write the man page")->group("");
  man->callback([&run, collect] {
    run = [collect]() -> Status {
      fmt::print("{}", ManPage(collect()));
      return {};
    };
  });
  auto shell = std::make_shared<std::string>();
  CLI::App* completions =
      app.add_subcommand("completions", "Write completions for a shell")->group("");
  completions->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  completions->callback([&run, collect, shell] {
    run = [collect, shell]() -> Status {
      const std::vector<CommandInfo> commands = collect();
      fmt::print("{}", *shell == "bash"  ? Bash(commands)
                       : *shell == "zsh" ? Zsh(commands)
                                         : Fish(commands));
      return {};
    };
  });
}

}  // namespace oscar::cli
