//! Scenario files and recorded scenarios of versions without modes, which had a table or a key for each part of a
//! mode.

use serde_json::{Map, json};
use toml::{Table, Value};

/// The scenario file in the current form; `None` if it has no table or key of an earlier one.
pub(in crate::scenario) fn converted(typed: &Table) -> Result<Option<Table>, String> {
    if typed.contains_key("mode") {
        return Ok(None);
    }
    let mut rest = typed.clone();
    let mut modes: Vec<(&str, Table)> = Vec::new();
    let mut beside = set_keys(rest.remove("beside"));
    if !beside.is_empty() {
        let with = beside.remove("kind").map(|kind| ("with".to_owned(), kind));
        beside.extend(with);
        modes.push(("beside", beside));
    }
    let [systems, parent, templates] = ["peers", "parent", "mix"].map(|key| rest.remove(key));
    let [systems, parent, templates] = [systems, parent, templates].map(|list| list.filter(is_set));
    let trace = take(&mut rest, "arrival", "trace");
    let [nodes, by, closed] = ["nodes", "by", "closed"].map(|key| take(&mut rest, "target", key));
    let event = set_keys(rest.remove("event"));
    let event = Some(Value::Table(event)).filter(is_set);
    let cluster = table([
        ("nodes", nodes),
        ("by", by),
        ("closed", closed),
        ("event", event),
    ]);
    if !cluster.is_empty() {
        let systems = table([("systems", systems)]);
        modes.push(("cluster", cluster.into_iter().chain(systems).collect()));
    } else if systems.is_some() {
        modes.push(("systems", table([("systems", systems)])));
    }
    if parent.is_some() {
        modes.push(("forks", table([("parent", parent)])));
    }
    if trace.is_some() {
        rest.remove("arrival");
        modes.push(("trace", table([("file", trace), ("templates", templates)])));
    } else if templates.is_some() {
        modes.push(("mix", table([("templates", templates)])));
    }
    let (kind, mut mode) = match modes.len() {
        0 if rest == *typed => return Ok(None),
        0 => return Ok(Some(rest)),
        1 => modes.remove(0),
        _ => {
            let kinds: Vec<&str> = modes.iter().map(|(kind, _)| *kind).collect();
            return Err(format!(
                "a scenario has one mode, and this one has the tables of several: {}",
                kinds.join(", ")
            ));
        }
    };
    mode.insert("kind".to_owned(), kind.into());
    rest.insert("mode".to_owned(), mode.into());
    Ok(Some(rest))
}

fn table<const N: usize>(entries: [(&str, Option<Value>); N]) -> Table {
    let entries = entries.into_iter();
    let set = entries.filter_map(|(key, value)| Some((key.to_owned(), value?)));
    set.collect()
}

/// The keys of a table that are not at a value which earlier versions ignored.
fn set_keys(table: Option<Value>) -> Table {
    match table {
        Some(Value::Table(table)) => table
            .into_iter()
            .filter(|(_, value)| is_set(value))
            .collect(),
        _ => Table::new(),
    }
}

/// Removes a key, and its table if that was its last key.
fn take(file: &mut Table, table: &str, key: &str) -> Option<Value> {
    let inner = file.get_mut(table)?.as_table_mut()?;
    let value = inner.remove(key);
    if value.is_some() && inner.is_empty() {
        file.remove(table);
    }
    value.filter(is_set)
}

fn is_set(value: &Value) -> bool {
    match value {
        Value::String(text) => !text.is_empty() && text != "none",
        Value::Integer(number) => *number != 0,
        Value::Array(list) => !list.is_empty(),
        Value::Table(table) => !table.is_empty(),
        Value::Float(_) | Value::Boolean(_) | Value::Datetime(_) => true,
    }
}

/// Gives a scenario recorded by an earlier version its mode. The error names modes of which it has several.
pub(in crate::scenario) fn convert_recorded(
    scenario: &mut Map<String, serde_json::Value>,
) -> Result<(), String> {
    use serde_json::Value;

    if scenario.contains_key("mode") {
        return Ok(());
    }
    let is_set = |value: &Value| match value {
        Value::Null => false,
        Value::Array(list) => !list.is_empty(),
        Value::Number(number) => number.as_u64() != Some(0),
        _ => true,
    };
    let mut take = |key: &str| scenario.remove(key).filter(is_set);
    let (beside, prefault) = (take("beside"), take("beside_prefault"));
    let [peers, mix, parent, trace, event] =
        ["peers", "mix", "parent", "trace", "event"].map(&mut take);
    let list = |list: Option<Value>| list.unwrap_or_else(|| json!([]));
    let mut peers = list(peers);
    for peer in peers.as_array_mut().into_iter().flatten() {
        let by = peer
            .get_mut("target")
            .and_then(|target| target.get_mut("by"));
        let by = by.map(Value::take);
        peer["by"] = list(by.filter(is_set));
    }
    let nodes = |key: &str| {
        scenario
            .get("target")
            .and_then(|target| target.get(key))
            .cloned()
    };
    let has_peers = is_set(&peers);
    let modes = [
        beside.map(|kind| match kind.as_str() {
            Some("host-process") => json!({ "beside": "host_process" }),
            _ => json!({ "beside": { "vmm_direct": { "prefault": prefault } } }),
        }),
        parent.map(|steps| json!({ "forks": steps })),
        match (trace, mix) {
            (Some(trace), mix) => {
                Some(json!({ "trace": { "trace": trace, "templates": list(mix) } }))
            }
            (None, mix) => mix.map(|templates| json!({ "mix": templates })),
        },
        match nodes("nodes").filter(is_set) {
            Some(count) => Some(json!({ "cluster": {
                "nodes": count, "by": list(nodes("by")), "closed": list(nodes("closed")), "event": event, "peers": peers,
            } })),
            None => has_peers.then(|| json!({ "systems": peers })),
        },
    ];
    let mut modes = modes.into_iter().flatten();
    let mode = modes.next().unwrap_or_else(|| json!("single"));
    if let Some(second) = modes.next() {
        return Err(format!(
            "the recorded scenario has two modes: {mode} and {second}"
        ));
    }
    scenario.insert("mode".to_owned(), mode);
    Ok(())
}
