//! An index of the Rust sources: which names each file defines.

use std::{
    collections::{BTreeSet, HashSet},
    fs,
    path::{Path, PathBuf},
};

/// Files whose words are indexed.
const TEXT_ENDINGS: [&str; 5] = [".rs", ".toml", ".c", ".h", ".py"];
const KEYWORDS: [&str; 10] = [
    "fn",
    "struct",
    "enum",
    "union",
    "mod",
    "trait",
    "const",
    "static",
    "type",
    "macro_rules!",
];

#[derive(Debug, Default)]
struct SourceFile {
    /// Crate name and modules, `["vmm", "devices", "queue"]`.
    modules: Vec<String>,
    /// Names of items, the methods of types included.
    items: BTreeSet<String>,
    /// Types that the file defines or has an `impl` block for.
    types: BTreeSet<String>,
    /// Names of enum variants and struct fields, and some other names that begin a line.
    members: BTreeSet<String>,
}

/// All Rust sources of the workspace.
#[derive(Debug)]
pub(super) struct Sources {
    files: Vec<SourceFile>,
    /// Every word in the files with [`TEXT_ENDINGS`].
    words: HashSet<String>,
    /// Crates from the registry, and the standard library.
    foreign_crates: BTreeSet<String>,
}

impl Sources {
    pub(super) fn load(root: &Path) -> Self {
        let mut sources = Self {
            files: Vec::new(),
            words: HashSet::new(),
            foreign_crates: foreign_crates(root),
        };
        for dir in visible_dirs(root) {
            if !["results", "docs", "ci"].contains(&file_name(&dir).as_str()) {
                sources.walk(&dir, &[]);
            }
        }
        sources
    }

    fn walk(&mut self, dir: &Path, modules: &[String]) {
        let package = package_name(dir);
        for path in entries(dir) {
            let name = file_name(&path);
            if is_visible_dir(&path) {
                let inner = match (name.as_str(), &package) {
                    ("node_modules", _) => continue,
                    (_, Some(package)) => vec![package.clone()],
                    ("src", None) => modules.to_vec(),
                    _ => [modules, &[name]].concat(),
                };
                self.walk(&path, &inner);
            } else if TEXT_ENDINGS.iter().any(|ending| name.ends_with(ending))
                && let Ok(text) = fs::read_to_string(&path)
            {
                for word in words(&text) {
                    if !self.words.contains(word) {
                        self.words.insert(word.to_owned());
                    }
                }
                if let Some(stem) = name.strip_suffix(".rs") {
                    self.files.push(SourceFile::parse(modules, stem, &text));
                }
            }
        }
    }

    /// Whether a function of this name exists.
    pub(super) fn has_function(&self, name: &str) -> bool {
        self.files.iter().any(|file| file.items.contains(name))
    }

    pub(super) fn has_word(&self, word: &str) -> bool {
        self.words.contains(word)
    }

    /// Whether the sources define `path`. In a path such as `a::b::c`, each pair of neighbouring segments must exist: a
    /// module and a name in it, or a type and one of its methods, fields or variants. Paths into other crates count as
    /// defined.
    pub(super) fn defines(&self, path: &str) -> bool {
        let segments: Vec<&str> = path.split("::").collect();
        if segments.len() > 1 && self.foreign_crates.contains(segments[0]) {
            return true;
        }
        match segments[..] {
            [name] => self.files.iter().any(|file| file.has(name)),
            _ => segments
                .windows(2)
                .all(|pair| self.files.iter().any(|file| file.has_pair(pair))),
        }
    }
}

impl SourceFile {
    fn parse(modules: &[String], stem: &str, text: &str) -> Self {
        let mut file = Self {
            modules: modules.to_vec(),
            ..Self::default()
        };
        if !["lib", "main", "mod"].contains(&stem) {
            file.modules.push(stem.to_owned());
        }
        for line in text.lines() {
            file.read_line(without_modifiers(line.trim()));
        }
        file
    }

    fn read_line(&mut self, line: &str) {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        if KEYWORDS.contains(&first) {
            let name = identifier(rest.trim_start_matches("fn "));
            self.items.insert(name.to_owned());
            if ["struct", "enum", "union", "trait", "type"].contains(&first) {
                self.types.insert(name.to_owned());
            }
        } else if first.starts_with("impl") {
            let head = line.split('{').next().unwrap_or_default();
            self.types.extend(words(head).map(str::to_owned));
        } else {
            let name = identifier(line);
            let after = line[name.len()..].trim_start();
            let is_member = after.is_empty() || after.starts_with([',', '(', '{', ':', '=']);
            if !name.is_empty() && is_member {
                self.members.insert(name.to_owned());
            }
        }
    }

    fn has(&self, name: &str) -> bool {
        self.items.contains(name)
            || self.members.contains(name)
            || self.modules.iter().any(|module| module == name)
    }

    fn has_pair(&self, pair: &[&str]) -> bool {
        let (outer, inner) = (pair[0], pair[1]);
        let in_module = self.modules.iter().any(|module| module == outer);
        (in_module || self.types.contains(outer)) && self.has(inner)
    }
}

/// The directories in `dir` that are neither hidden nor cargo's output.
pub(super) fn visible_dirs(dir: &Path) -> Vec<PathBuf> {
    let dirs = entries(dir).into_iter();
    dirs.filter(|path| is_visible_dir(path)).collect()
}

fn is_visible_dir(path: &Path) -> bool {
    // Cargo marks its target directories with this file.
    path.is_dir() && !path.join("CACHEDIR.TAG").exists()
}

/// The entries of a directory that are not hidden, sorted by path.
pub(super) fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).expect("a readable directory");
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("a directory entry").path())
        .filter(|path| !file_name(path).starts_with('.'))
        .collect();
    paths.sort();
    paths
}

pub(super) fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// The name of the package in `dir` as a crate name. `None` if the directory has no manifest with a package.
fn package_name(dir: &Path) -> Option<String> {
    let manifest = fs::read_to_string(dir.join("Cargo.toml")).ok()?;
    let manifest: toml::Value = toml::from_str(&manifest).ok()?;
    let name = manifest.get("package")?.get("name")?.as_str()?;
    Some(name.replace('-', "_"))
}

fn foreign_crates(root: &Path) -> BTreeSet<String> {
    // Read line by line: an unoptimized TOML parser needs seconds for this file.
    let lock = fs::read_to_string(root.join("Cargo.lock")).expect("Cargo.lock");
    let packages = lock.split("[[package]]");
    let foreign = packages.filter(|package| package.contains("\nsource = "));
    let names = foreign.filter_map(|package| package.split('"').nth(1));
    ["std", "core", "alloc"]
        .into_iter()
        .chain(names)
        .map(|name| name.replace('-', "_"))
        .collect()
}

fn without_modifiers(mut line: &str) -> &str {
    const MODIFIERS: [&str; 8] = [
        "pub ",
        "pub(crate) ",
        "pub(super) ",
        "async ",
        "unsafe ",
        "default ",
        "extern \"C\" ",
        "const fn ",
    ];
    while let Some(rest) = MODIFIERS
        .iter()
        .find_map(|modifier| line.strip_prefix(modifier))
    {
        if line.starts_with("const fn ") {
            return &line["const ".len()..];
        }
        line = rest;
    }
    line
}

/// The identifier at the beginning of a text. Empty if there is none.
fn identifier(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let name = &text[..end.unwrap_or(text.len())];
    if name.starts_with(|c: char| c.is_ascii_digit()) {
        ""
    } else {
        name
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
}
