//! Rejects unknown keys, and merges a scenario file with the defaults.

use toml::{Table, Value};

use super::ScenarioError;

/// Known keys of the tables in each list. The defaults contain empty lists, so these keys cannot be read from the
/// defaults.
const LISTS: [(&str, &[&str]); 5] = [
    ("gates", &["name", "metric", "limit", "accepted"]),
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
    (
        "peers",
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
    ("mix", &["template", "weight"]),
    ("parent", &["argv", "cell", "expect_stdout", "upload", "to"]),
];

/// Returns [`ScenarioError::UnknownKey`] for the first key of `typed` that `defaults` does not have.
pub(super) fn check(name: &str, typed: &Table, defaults: &Table) -> Result<(), ScenarioError> {
    check_table(name, "", typed, defaults)?;
    for (list, keys) in LISTS {
        let items = typed.get(list).and_then(Value::as_array);
        for item in items.into_iter().flatten().filter_map(Value::as_table) {
            for key in item.keys() {
                known(name, &format!("{list}."), key, keys)?;
            }
        }
    }
    Ok(())
}

fn check_table(name: &str, at: &str, typed: &Table, defaults: &Table) -> Result<(), ScenarioError> {
    let all: Vec<&str> = defaults.keys().map(String::as_str).collect();
    for (key, value) in typed {
        known(name, at, key, &all)?;
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

/// Completes each peer with the keys of `[target]` that it does not set: `template`, `memory`, `prefault` and
/// `start_timeout` from the scenario's target, the others from the defaults.
pub(super) fn complete_peers(mut merged: Table) -> Table {
    let target = merged.get("target").and_then(Value::as_table).cloned();
    let empty: [(&str, Value); 9] = [
        ("api_url", String::new().into()),
        ("sandbox_url", String::new().into()),
        ("api", "v2".to_owned().into()),
        ("api_key_env", "E2B_API_KEY".to_owned().into()),
        ("command", Value::Array(Vec::new())),
        ("warm", 0.into()),
        ("nodes", 0.into()),
        ("by", Value::Array(Vec::new())),
        ("closed", Value::Array(Vec::new())),
    ];
    let mut inherited = target.unwrap_or_default();
    inherited.remove("kind");
    inherited.extend(empty.map(|(key, value)| (key.to_owned(), value)));
    let peers = merged.get_mut("peers").and_then(Value::as_array_mut);
    for peer in peers.into_iter().flatten() {
        if let Value::Table(own) = peer {
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
