//! The settings of files and options, with their places.

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io,
    io::Read,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use toml::{
    Spanned, Table, Value,
    de::{DeTable, DeValue, ValueDeserializer},
};

use super::{
    Failure,
    earlier::{self, FlagText},
    schema,
    sections::ServerConfig,
};

const MAX_FILE: u64 = 1 << 20;

/// Where a value is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// A file and a line, counted from 1; 0 for the whole file.
    File(PathBuf, usize),
    /// An option with its dashes.
    Flag(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path, 0) => write!(f, "{}", path.display()),
            Self::File(path, line) => write!(f, "{}:{line}", path.display()),
            Self::Flag(flag) => f.write_str(flag),
        }
    }
}

/// A mistake in the configuration: place, cause and cure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mistake {
    /// `None`: no place sets the key.
    source: Option<Source>,
    what: String,
}

impl Mistake {
    pub(super) fn new(source: Source, what: String) -> Self {
        let source = Some(source);
        Self { source, what }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) => write!(f, "{source}: {}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

/// One failure for all mistakes.
pub(super) fn report(mistakes: &[Mistake]) -> Failure {
    let lines: Vec<_> = mistakes.iter().map(Mistake::to_string).collect();
    Failure::Usage(match lines.as_slice() {
        [only] => only.clone(),
        lines => format!(
            "{} mistakes in the configuration:\n  {}",
            lines.len(),
            lines.join("\n  ")
        ),
    })
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Setting {
    pub(super) value: Value,
    pub(super) source: Source,
}

/// All settings that differ from "not set", by `section.key`.
#[derive(Debug, Default)]
pub(in super::super) struct Layers {
    settings: BTreeMap<String, Setting>,
    mistakes: Vec<Mistake>,
    /// Options of earlier releases in use, each with its key.
    earlier: Vec<String>,
}

impl Layers {
    /// Reads the named configuration file, or else `usual` if it exists, and applies the options. An options file of an
    /// earlier release is read below the configuration file of the same directory.
    pub(super) fn load(named: Option<&Path>, usual: &Path, flags: Vec<FlagText>) -> Self {
        let mut layers = Self::default();
        let path = named.unwrap_or(usual);
        let is_earlier = named.is_some() && path.extension().is_none_or(|name| name != "toml");
        if is_earlier || named.is_none() {
            let old = if is_earlier {
                path.to_owned()
            } else {
                path.with_file_name("server.conf")
            };
            let new = path.with_file_name("cube.toml");
            // The package of this release no longer contains an options file.
            let is_optional = named.is_none() || new.is_file();
            layers.read_earlier(&old, is_optional);
            layers.read(&new, true);
        } else {
            layers.read(path, false);
        }
        layers.apply(flags);
        layers
    }

    /// Text of a file. `None` if it cannot be read, which is a mistake unless it is optional and absent.
    fn text(&mut self, path: &Path, is_optional: bool) -> Option<String> {
        let text = File::open(path).and_then(|file| io::read_to_string(file.take(MAX_FILE)));
        match text {
            Ok(text) => Some(text),
            Err(why) if is_optional && why.kind() == io::ErrorKind::NotFound => None,
            Err(why) => {
                let source = Source::File(path.to_owned(), 0);
                self.mistakes.push(Mistake::new(
                    source,
                    format!("cannot read the configuration file: {why}"),
                ));
                None
            }
        }
    }

    fn read_earlier(&mut self, path: &Path, is_optional: bool) {
        let Some(text) = self.text(path, is_optional) else {
            return;
        };
        let (lines, mistakes) = earlier::read_file(path, &text);
        self.mistakes.extend(mistakes);
        if !lines.is_empty() {
            self.earlier
                .push(format!("the options file {}", path.display()));
        }
        self.add_texts(
            lines
                .into_iter()
                .map(|(key, text, source)| (key.to_owned(), text, source)),
        );
    }

    fn read(&mut self, path: &Path, is_optional: bool) {
        let Some(text) = self.text(path, is_optional) else {
            return;
        };
        let at = |offset: usize| {
            let line = text
                .bytes()
                .take(offset)
                .filter(|byte| *byte == b'\n')
                .count()
                + 1;
            Source::File(path.to_owned(), line)
        };
        let (sections, errors) = DeTable::parse_recoverable(&text);
        for why in errors {
            let start = why.span().map_or(0, |span| span.start);
            self.mistakes
                .push(Mistake::new(at(start), why.message().to_owned()));
        }
        for (section, keys) in sections.into_inner() {
            let source = at(section.span().start);
            let section = section.into_inner();
            let DeValue::Table(keys) = keys.into_inner() else {
                let cure = match schema::keys().find(|(_, key, _)| *key == section) {
                    Some((known, ..)) => format!("write it below [{known}]"),
                    None => "all keys belong to a section, such as [server]".to_owned(),
                };
                self.mistakes.push(Mistake::new(
                    source,
                    format!("`{section}` is not in a section: {cure}"),
                ));
                continue;
            };
            if !schema::is_section(&section) {
                self.mistakes
                    .push(Mistake::new(source, schema::unknown(&section, "")));
                continue;
            }
            for (key, value) in keys {
                let source = at(key.span().start);
                let key = format!("{section}.{}", key.into_inner());
                match value_of(value) {
                    Ok(value) => self.add(key, value, source),
                    Err(why) => self.mistakes.push(Mistake::new(source, why)),
                }
            }
        }
    }

    fn apply(&mut self, flags: Vec<FlagText>) {
        for flag in flags.iter().filter(|flag| flag.is_earlier) {
            self.earlier
                .push(format!("{} (now {})", flag.flag, flag.key));
        }
        self.add_texts(
            flags
                .into_iter()
                .map(|flag| (flag.key, flag.text, Source::Flag(flag.flag))),
        );
    }

    /// Adds values from text, for example from `--set`. Values of the same list are joined.
    fn add_texts(&mut self, texts: impl Iterator<Item = (String, String, Source)>) {
        let mut lists = BTreeMap::<String, (Vec<Value>, Source)>::new();
        let mut single = BTreeMap::<String, Source>::new();
        for (key, text, source) in texts {
            if schema::default_of(&key).is_some_and(|default| default.is_array()) {
                let list = lists.entry(key).or_insert_with(|| (Vec::new(), source));
                list.0.push(text.into());
            } else if let Some(first) = single.insert(key.clone(), source.clone()) {
                self.mistakes.push(Mistake::new(
                    source,
                    format!("{key} is already set by {first}: remove one of them"),
                ));
            } else {
                let value = typed(&key, &text);
                self.add(key, value, source);
            }
        }
        for (key, (values, source)) in lists {
            self.add(key, Value::Array(values), source);
        }
    }

    fn add(&mut self, key: String, value: Value, source: Source) {
        if schema::default_of(&key).is_none() {
            let what = match key.split_once('.') {
                Some((section, key)) => schema::unknown(section, key),
                None => {
                    format!("{key:?} is not SECTION.KEY=VALUE: write it like pool.max_sandboxes=64")
                }
            };
            self.mistakes.push(Mistake::new(source, what));
        } else {
            self.settings.insert(key, Setting { value, source });
        }
    }

    /// Decodes all settings.
    ///
    /// # Errors
    /// Returns an error that lists all mistakes of the files, the options and the values.
    pub(super) fn config(&self) -> Result<ServerConfig, Failure> {
        let mut mistakes = self.mistakes.clone();
        let mut all = Table::new();
        for (key, setting) in &self.settings {
            if let Err(why) = decode_alone(key, &setting.value) {
                let source = setting.source.clone();
                let example = schema::example(key);
                let cure = example.map(|line| format!("; write it like `{line}`"));
                mistakes.push(Mistake::new(
                    source,
                    format!("{key}: {why}{}", cure.unwrap_or_default()),
                ));
            }
            insert(&mut all, key, setting.value.clone());
        }
        match ServerConfig::deserialize(all) {
            Ok(config) if mistakes.is_empty() => Ok(config),
            // Each value was decoded alone, so this one is in the list.
            Ok(_) | Err(_) => Err(report(&mistakes)),
        }
    }

    pub(super) fn setting(&self, key: &str) -> Option<&Setting> {
        self.settings.get(key)
    }

    /// A mistake of the value of `key`.
    pub(super) fn mistake(&self, key: &str, what: impl fmt::Display) -> Mistake {
        Mistake {
            source: self.setting(key).map(|setting| setting.source.clone()),
            what: format!("{key}: {what}"),
        }
    }

    /// A warning if options of earlier releases are in use.
    pub(in super::super) fn deprecation(&self) -> Option<String> {
        (!self.earlier.is_empty()).then(|| {
            format!(
                "the next release rejects: {}. Move the settings to {} (`cube-api config check` prints those of an options \
                 file in its format), or use --set SECTION.KEY=VALUE",
                self.earlier.join(", "),
                model::CONFIG_FILE
            )
        })
    }
}

fn value_of(value: Spanned<DeValue<'_>>) -> Result<Value, String> {
    Value::deserialize(ValueDeserializer::from(value)).map_err(|why| why.message().to_owned())
}

/// The value that a text means for `key`: itself, or what it is in TOML if the key needs a number or a bool.
fn typed(key: &str, text: &str) -> Value {
    let plain = Value::from(text);
    if decode_alone(key, &plain).is_ok() {
        return plain;
    }
    let value = DeValue::parse(text)
        .ok()
        .and_then(|value| value_of(value).ok());
    value.unwrap_or(plain)
}

/// Decodes one setting, the others having their defaults.
fn decode_alone(key: &str, value: &Value) -> Result<(), String> {
    let mut alone = Table::new();
    insert(&mut alone, key, value.clone());
    let decoded = ServerConfig::deserialize(alone);
    decoded.map(drop).map_err(|why| why.message().to_owned())
}

fn insert(table: &mut Table, key: &str, value: Value) {
    if let Some((section, key)) = key.split_once('.') {
        let section = table.entry(section).or_insert_with(|| Table::new().into());
        if let Value::Table(section) = section {
            section.insert(key.to_owned(), value);
        }
    }
}
