//! The known keys: those of [`ServerConfig`], with their defaults.

use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::sections::ServerConfig;

/// The documented default file, which the package installs. A test compares it with the keys and defaults.
pub(super) const DOCUMENTED: &str = include_str!("../../../../dev/packaging/cube.toml");

/// Keys and defaults of each section. `null`: not set by default.
static SECTIONS: LazyLock<Map<String, Value>> =
    LazyLock::new(|| match serde_json::to_value(ServerConfig::default()) {
        Ok(Value::Object(sections)) => sections,
        other => panic!("the default configuration is not an object: {other:?}"),
    });

/// All keys as `section.key`, in the order of the sections' names.
pub(super) fn keys() -> impl Iterator<Item = (&'static str, &'static str, &'static Value)> {
    SECTIONS.iter().flat_map(|(section, keys)| {
        let keys = keys.as_object().into_iter().flatten();
        keys.map(move |(key, default)| (section.as_str(), key.as_str(), default))
    })
}

/// The default of `section.key`, or `None` if the key is unknown.
pub(super) fn default_of(key: &str) -> Option<&'static Value> {
    let (section, key) = key.split_once('.')?;
    SECTIONS.get(section)?.get(key)
}

pub(super) fn is_section(name: &str) -> bool {
    SECTIONS.contains_key(name)
}

/// Why `key` in `section` is unknown, and the nearest known key.
pub(super) fn unknown(section: &str, key: &str) -> String {
    if !is_section(section) {
        let cure = nearest(section, SECTIONS.keys().map(String::as_str));
        return format!("unknown section [{section}]: did you mean [{cure}]?");
    }
    let elsewhere = keys().find(|(_, known, _)| *known == key);
    let own = keys().filter(|(known, ..)| *known == section);
    let cure = match elsewhere {
        Some((other, ..)) => format!("it belongs in [{other}]"),
        None => format!(
            "did you mean `{}`?",
            nearest(key, own.map(|(_, key, _)| key))
        ),
    };
    format!("unknown key `{key}` in [{section}]: {cure}")
}

fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> &'a str {
    let nearest = known.min_by_key(|known| strsim::damerau_levenshtein(known, word));
    nearest.unwrap_or_default()
}

/// The line of the documented default file that shows how to write `section.key`.
pub(super) fn example(key: &str) -> Option<&'static str> {
    let (section, key) = key.split_once('.')?;
    let (_, rest) = DOCUMENTED.split_once(&format!("\n[{section}]\n"))?;
    let own = rest.split("\n[").next()?;
    own.lines()
        .filter_map(|line| line.strip_prefix('#'))
        .find(|line| {
            line.strip_prefix(key)
                .is_some_and(|rest| rest.starts_with(" = "))
        })
}
