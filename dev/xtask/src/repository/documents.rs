//! Tests that README, SPECIFICATION, ARCHITECTURE and the guides name only files, symbols and tests that exist.
//!
//! The form of a code span decides whether it is checked:
//!
//! - a *path* has a `/`, no blanks, and begins with a top-level directory of this repository or ends like a source
//!   file. A component in capitals is a placeholder: only the components before it are checked
//! - a *symbol* has `::`, or is CamelCase with two capitals, or is in CAPITALS
//! - a *name* is snake_case with an underscore
//!
//! Everything else (commands, options, formats, terms of Linux) is not checked.

use std::{fs, path::Path};

use clap::Parser;

use super::{
    markdown,
    sources::{Sources, entries, file_name, visible_dirs},
};
use crate::{
    Cli, Task,
    markdown::{Located, links},
    specification::check,
    tiers,
    workspace::Workspace,
};

/// Endings of paths that are checked even if they do not begin with a top-level directory.
const SOURCE_ENDINGS: [&str; 8] = [".rs", ".toml", ".md", ".txt", ".yml", ".py", ".mjs", ".c"];
/// CamelCase words of Linux, and magic numbers of this project's formats.
const OTHER_TERMS: [&str; 4] = ["MemAvailable", "MemFree", "AnonHugePages", "CUBESNAP"];
const LINUX_PREFIXES: [&str; 6] = ["KVM_", "CLOCK_", "MAP_", "O_", "SIG", "TUN"];

fn workspace() -> Workspace {
    Workspace::locate().expect("a checkout")
}

fn read(root: &Path, name: &str) -> String {
    fs::read_to_string(root.join(name)).expect(name)
}

/// The documents whose paths are checked, relative to the root.
fn guides(root: &Path) -> Vec<String> {
    let top = [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "SPECIFICATION.md",
        "ARCHITECTURE.md",
    ];
    let mut guides: Vec<String> = top.map(str::to_owned).into();
    let groups = visible_dirs(root);
    let dirs = groups.iter().flat_map(|dir| visible_dirs(dir));
    for dir in dirs.chain(groups.clone()) {
        let name = dir.strip_prefix(root).unwrap_or(&dir).display().to_string();
        let files = entries(&dir).into_iter().map(|path| file_name(&path));
        let documents = files.filter(|file| file.ends_with(".md") && file != "report.md");
        guides.extend(documents.map(|file| format!("{name}/{file}")));
    }
    guides
}

fn is_path(span: &str, top: &[String]) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._*{},-".contains(c);
    let first = span.split('/').next().unwrap_or_default();
    span.contains('/')
        && !span.starts_with("target/")
        // A path of an installed system.
        && !span.starts_with('/')
        && span.chars().all(plain)
        && (top.iter().any(|dir| dir == first)
            || SOURCE_ENDINGS.iter().any(|ending| span.ends_with(ending)))
}

/// Whether a path exists. `*` matches any part of a name, and `{a,b}` stands for both alternatives.
fn exists(root: &Path, path: &str) -> bool {
    if let Some((before, rest)) = path.split_once('{') {
        let (alternatives, after) = rest.split_once('}').unwrap_or((rest, ""));
        return alternatives
            .split(',')
            .all(|one| exists(root, &format!("{before}{one}{after}")));
    }
    let mut found = vec![root.to_owned()];
    for component in path.split('/').filter(|part| !part.is_empty()) {
        if is_placeholder(component) {
            return true;
        }
        found = match component.split_once('*') {
            None => found
                .iter()
                .map(|dir| dir.join(component))
                .filter(|path| path.exists())
                .collect(),
            Some((start, end)) => {
                let matches = |path: &Path| {
                    let name = file_name(path);
                    name.starts_with(start) && name.ends_with(end)
                };
                let inside = found.iter().filter(|dir| dir.is_dir());
                let all = inside.flat_map(|dir| entries(dir));
                all.filter(|path| matches(path)).collect()
            }
        };
        if found.is_empty() {
            return false;
        }
    }
    true
}

fn is_placeholder(component: &str) -> bool {
    let stem = component.split('.').next().unwrap_or_default();
    stem.len() > 1
        && stem.chars().all(|c| c.is_ascii_uppercase() || c == '-')
        && ![
            "README",
            "CONTRIBUTING",
            "CHANGELOG",
            "SECURITY",
            "HOURS",
            "ARCHITECTURE",
            "SPECIFICATION",
            "LICENSE",
        ]
        .contains(&stem)
}

#[test]
fn the_usual_tests_of_the_tier_kvm_exist() {
    let sources = Sources::load(workspace().root());
    let names = tiers::usual_kvm_tests();
    assert!(names.len() > 40, "{names:?}");
    let missing: Vec<_> = names
        .iter()
        .filter(|name| !sources.has_function(name))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn documents_name_only_paths_that_exist() {
    let workspace = workspace();
    let root = workspace.root();
    let top: Vec<String> = visible_dirs(root)
        .iter()
        .map(|dir| file_name(dir))
        .collect();
    let mut missing = Vec::new();
    for guide in guides(root) {
        let text = read(root, &guide);
        let dir = Path::new(&guide).parent().unwrap_or(Path::new(""));
        let spans = markdown::code_spans(&text).into_iter();
        for Located { line, text } in spans.filter(|span| is_path(&span.text, &top)) {
            // Scenarios and programs may be named without the ending of their file.
            let found = ["", ".toml", ".rs"].iter().any(|ending| {
                let path = format!("{text}{ending}");
                // Relative to the root, to the document, or to the sources of the document's crate.
                [root.to_owned(), root.join(dir), root.join(dir).join("src")]
                    .iter()
                    .any(|base| exists(base, &path))
            });
            if !found {
                missing.push(format!("{guide}:{line}: {text}"));
            }
        }
        for Located { line, text } in links(&text) {
            if !root.join(dir).join(&text).exists() {
                missing.push(format!("{guide}:{line}: link to {text}"));
            }
        }
    }
    assert!(
        missing.is_empty(),
        "paths that do not exist:\n{}",
        missing.join("\n")
    );
}

/// Every `cargo xtask` command in a code block or a code span. Commands with placeholders are not checked.
#[test]
fn documents_show_only_commands_that_xtask_accepts() {
    let workspace = workspace();
    let root = workspace.root();
    let mut wrong = Vec::new();
    for guide in guides(root) {
        let document = read(root, &guide);
        let mut candidates = markdown::code_spans(&document);
        candidates.extend(markdown::code_block_lines(&document));
        for Located { line, text } in candidates {
            let command = text.split(" #").next().unwrap_or_default().trim();
            let Some(arguments) = command.strip_prefix("cargo xtask ") else {
                continue;
            };
            let words: Vec<&str> = arguments.split_whitespace().collect();
            if words.iter().any(|word| is_argument_placeholder(word)) {
                continue;
            }
            let parsed = Cli::try_parse_from(std::iter::once("xtask").chain(words));
            let accepted = match parsed.map(|cli| cli.task) {
                Ok(Task::Bench { scenario, .. }) => root.join(scenario).is_file(),
                Ok(_) => true,
                Err(error) => error.kind() == clap::error::ErrorKind::DisplayHelp,
            };
            if !accepted {
                wrong.push(format!("{guide}:{line}: {command}"));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "commands that xtask refuses:\n{}",
        wrong.join("\n")
    );
}

fn is_argument_placeholder(word: &str) -> bool {
    let capitals = word.len() > 1 && word.chars().all(|c| c.is_ascii_uppercase());
    capitals || word == "N" || word.contains(['…', '[', '|', '*']) || word.contains("NAME")
}

/// README and the guides may quote only runs that are published in `results/`.
#[test]
fn documents_name_only_published_runs_that_exist() {
    let workspace = workspace();
    let root = workspace.root();
    let is_run = |span: &str| {
        let (_, day) = span.rsplit_once('-').unwrap_or_default();
        day.len() == 8 && day.bytes().all(|byte| byte.is_ascii_digit()) && span.contains("core")
    };
    let mut missing = Vec::new();
    for guide in guides(root) {
        let text = read(root, &guide);
        for Located { line, text } in markdown::code_spans(&text) {
            let run = text.trim_start_matches("results/");
            if is_run(run) && !root.join("results").join(run).is_dir() {
                missing.push(format!("{guide}:{line}: {run}"));
            }
        }
    }
    assert!(
        missing.is_empty(),
        "runs that are not in results/:\n{}",
        missing.join("\n")
    );
}

#[test]
fn promises_name_only_tests_that_exist() {
    let workspace = workspace();
    let root = workspace.root();
    let sources = Sources::load(root);
    let missing = check::missing(root, |name| sources.has_function(name));
    assert!(
        missing.is_empty(),
        "tests that do not exist:\n{}",
        missing.join("\n")
    );
}

#[test]
fn the_architecture_names_only_symbols_that_exist() {
    let workspace = workspace();
    let root = workspace.root();
    let sources = Sources::load(root);
    let document = read(root, "ARCHITECTURE.md");
    let spans = markdown::code_spans(&document);
    let mut symbols: Vec<Located> = spans;
    for Located { line, text } in markdown::code_block_lines(&document) {
        // In diagrams only qualified names are symbols.
        let tokens = text.split(|c: char| !c.is_ascii_alphanumeric() && !"_:".contains(c));
        let paths = tokens.map(|token| token.trim_matches(':'));
        symbols.extend(
            paths
                .filter(|path| path.contains("::"))
                .map(|path| Located {
                    line,
                    text: path.to_owned(),
                }),
        );
    }
    let missing: Vec<String> = symbols
        .iter()
        .filter(|symbol| !symbol_exists(&sources, &symbol.text))
        .map(|symbol| format!("ARCHITECTURE.md:{}: {}", symbol.line, symbol.text))
        .collect();
    assert!(
        missing.is_empty(),
        "symbols that do not exist:\n{}",
        missing.join("\n")
    );
}

/// In the guides, only qualified names are checked: other names often belong to protocols, Linux or E2B.
#[test]
fn guides_name_only_symbols_that_exist() {
    let workspace = workspace();
    let root = workspace.root();
    let sources = Sources::load(root);
    let mut missing = Vec::new();
    for guide in guides(root) {
        let document = read(root, &guide);
        let spans = markdown::code_spans(&document).into_iter();
        for Located { line, text } in spans.filter(|span| span.text.contains("::")) {
            let is_address = text.parse::<std::net::IpAddr>().is_ok();
            if !is_address && !symbol_exists(&sources, &text) {
                missing.push(format!("{guide}:{line}: {text}"));
            }
        }
    }
    assert!(
        missing.is_empty(),
        "symbols that do not exist:\n{}",
        missing.join("\n")
    );
}

/// Whether a symbol exists. Also true for spans that do not have the form of a symbol, and for terms of Linux.
fn symbol_exists(sources: &Sources, span: &str) -> bool {
    let span = span.trim_end_matches("()");
    if let Some((before, rest)) = span.split_once("::{") {
        let names = rest.trim_end_matches('}').split(',');
        return names
            .map(|name| format!("{before}::{}", name.trim()))
            .all(|path| symbol_exists(sources, &path));
    }
    let is_identifier = |part: &str| {
        !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    if !span.split("::").all(is_identifier) {
        return true;
    }
    let linux =
        OTHER_TERMS.contains(&span) || LINUX_PREFIXES.iter().any(|prefix| span.starts_with(prefix));
    if linux {
        return true;
    }
    if span.contains("::") || is_camel_case(span) || is_constant(span) {
        sources.defines(span) || (span.contains('_') && sources.has_word(span))
    } else if is_snake_case(span) {
        sources.has_word(span)
    } else {
        true
    }
}

fn is_camel_case(name: &str) -> bool {
    let capitals = name.chars().filter(char::is_ascii_uppercase).count();
    name.starts_with(|c: char| c.is_ascii_uppercase())
        && capitals > 1
        && name.chars().any(|c| c.is_ascii_lowercase())
}

/// Shorter words in capitals are acronyms.
fn is_constant(name: &str) -> bool {
    name.len() > 4 && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
}

fn is_snake_case(name: &str) -> bool {
    name.contains('_')
        // A prefix such as `kvm_` stands for many names.
        && !name.ends_with('_')
        && name
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}
