//! Rejects unknown keys, and merges a scenario file with the defaults.

use toml::{Table, Value};

use super::ScenarioError;

/// Known keys of the tables in each list. The defaults contain empty lists, so these keys cannot be read from the
/// defaults.
const LISTS: [(&str, &[&str]); 2] = [
    ("gates", &["name", "metric", "limit", "accepted", "host"]),
    (
        "turns",
        &[
            "name",
            "argv",
            "cell",
            "expect_stdout",
            "times",
            "exchange",
            "count",
            "repeat",
            "amount",
            "every",
        ],
    ),
];

/// Known keys of `[mode]` by its kind.
const MODES: [(&str, &[&str]); 7] = [
    ("single", &["kind"]),
    ("beside", &["kind", "with", "prefault"]),
    ("systems", &["kind", "systems"]),
    ("forks", &["kind", "parent"]),
    ("mix", &["kind", "templates"]),
    ("trace", &["kind", "file", "templates"]),
    (
        "cluster",
        &["kind", "nodes", "by", "closed", "event", "systems"],
    ),
];

/// Known keys of the tables in `[mode]`.
const MODE_TABLES: [(&str, &[&str]); 4] = [
    (
        "systems",
        &[
            "name",
            "argv",
            "expect_stdout",
            "kind",
            "api_url",
            "api",
            "api_key_env",
            "command",
            "sandbox_url",
            "warm",
            "by",
            "template",
            "memory",
            "prefault",
            "start_timeout",
        ],
    ),
    ("templates", &["template", "weight"]),
    ("parent", &["argv", "cell", "expect_stdout", "upload", "to"]),
    ("event", &["kind", "after", "running", "paused", "written"]),
];

/// Returns [`ScenarioError::UnknownKey`] for the first key of `typed` that `defaults` does not have.
pub(super) fn check(name: &str, typed: &Table, defaults: &Table) -> Result<(), ScenarioError> {
    check_table(name, "", typed, defaults)?;
    lists(name, "", typed, &LISTS)?;
    let Some(mode) = typed.get("mode").and_then(Value::as_table) else {
        return Ok(());
    };
    let kind = mode.get("kind").and_then(Value::as_str).unwrap_or("single");
    // Without a known kind, the conversion names the known ones.
    if let Some((_, keys)) = MODES.iter().find(|(name, _)| *name == kind) {
        for key in mode.keys() {
            let is_of_another = MODES.iter().any(|(_, keys)| keys.contains(&key.as_str()));
            if is_of_another && !keys.contains(&key.as_str()) {
                return Err(ScenarioError::Value {
                    name: name.to_owned(),
                    what: format!("mode.{key} has no meaning for kind {kind:?}"),
                });
            }
            known(name, "mode.", key, keys)?;
        }
    }
    lists(name, "mode.", mode, &MODE_TABLES)
}

/// Checks the tables at these keys, and the tables of the lists at them.
fn lists(
    name: &str,
    at: &str,
    typed: &Table,
    lists: &[(&str, &[&str])],
) -> Result<(), ScenarioError> {
    for (list, keys) in lists {
        let tables: Vec<&Table> = match typed.get(*list) {
            Some(Value::Table(table)) => vec![table],
            Some(Value::Array(items)) => items.iter().filter_map(Value::as_table).collect(),
            _ => Vec::new(),
        };
        for key in tables.into_iter().flat_map(Table::keys) {
            known(name, &format!("{at}{list}."), key, keys)?;
        }
    }
    Ok(())
}

fn check_table(name: &str, at: &str, typed: &Table, defaults: &Table) -> Result<(), ScenarioError> {
    let all: Vec<&str> = defaults.keys().map(String::as_str).collect();
    for (key, value) in typed {
        known(name, at, key, &all)?;
        if at.is_empty() && key == "mode" {
            continue;
        }
        if let (Some(inner), Some(Value::Table(inner_defaults))) =
            (value.as_table(), defaults.get(key))
        {
            check_table(name, &format!("{at}{key}."), inner, inner_defaults)?;
        }
    }
    Ok(())
}

fn known(name: &str, at: &str, key: &str, all: &[&str]) -> Result<(), ScenarioError> {
    if all.contains(&key) {
        return Ok(());
    }
    Err(ScenarioError::UnknownKey {
        name: name.to_owned(),
        key: format!("{at}{key}"),
        nearest: all
            .iter()
            .min_by_key(|candidate| strsim::damerau_levenshtein(candidate, key))
            .map(|candidate| format!("{at}{candidate}")),
    })
}

/// Completes each system of the mode with the keys of `[target]` that it does not set: `template`, `memory`, `prefault` and
/// `start_timeout` from the scenario's target, the others from the defaults.
pub(super) fn complete_systems(mut merged: Table) -> Table {
    let target = merged.get("target").and_then(Value::as_table).cloned();
    let empty: [(&str, Value); 6] = [
        ("api_url", String::new().into()),
        ("sandbox_url", String::new().into()),
        ("api", "v2".to_owned().into()),
        ("api_key_env", "E2B_API_KEY".to_owned().into()),
        ("command", Value::Array(Vec::new())),
        ("warm", 0.into()),
    ];
    let mut inherited = target.unwrap_or_default();
    inherited.remove("kind");
    inherited.extend(empty.map(|(key, value)| (key.to_owned(), value)));
    let mode = merged.get_mut("mode").and_then(Value::as_table_mut);
    let systems = mode.and_then(|mode| mode.get_mut("systems"));
    let systems = systems.and_then(Value::as_array_mut);
    for system in systems.into_iter().flatten() {
        if let Value::Table(own) = system {
            *own = merge(inherited.clone(), std::mem::take(own));
        }
    }
    merged
}

/// Merges `upper` over `lower`. Tables are merged recursively; any other value of `upper` replaces the value of
/// `lower`.
pub(super) fn merge(mut lower: Table, upper: Table) -> Table {
    for (key, value) in upper {
        let merged = match (lower.remove(&key), value) {
            (Some(Value::Table(l)), Value::Table(u)) => Value::Table(merge(l, u)),
            (_, value) => value,
        };
        lower.insert(key, merged);
    }
    lower
}
