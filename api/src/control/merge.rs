//! Merges the responses of several nodes. Pure.

use std::collections::BTreeSet;

use envd::Timestamp;
use serde_json::{Map, Value};

use super::paging::{Page, Position};

/// One node's page of a list.
#[derive(Debug, Default)]
pub(super) struct Part {
    pub(super) items: Vec<Value>,
    /// Positions of the items.
    pub(super) positions: Vec<Position>,
    /// Whether the node has more items.
    pub(super) has_more: bool,
}

/// The page of all nodes, and the token of the next one. Each part is that node's page for the same request, so no item
/// omitted by a node precedes an item of the merged page.
pub(super) fn page(page: &Page, parts: Vec<Part>) -> (Vec<Value>, Option<String>) {
    let has_more = parts.iter().any(|part| part.has_more);
    let items = parts
        .into_iter()
        .flat_map(|part| part.positions.into_iter().zip(part.items));
    let (shown, token) = page.cut(items.collect(), |(position, _)| position.clone());
    let token = match (token, shown.last()) {
        (None, Some((last, _))) if has_more => Some(super::paging::token(last)),
        (token, _) => token,
    };
    (shown.into_iter().map(|(_, item)| item).collect(), token)
}

/// The position of a listed sandbox, from its `startedAt` and `sandboxID`.
pub(super) fn position(item: &Value) -> Option<Position> {
    position_in(item, "startedAt", "sandboxID")
}

fn position_in(item: &Value, time: &str, id: &str) -> Option<Position> {
    let at = Timestamp::parse(item.get(time)?.as_str()?).ok()?;
    Some(Position {
        at: at.unix_ns() / 1_000_000,
        id: item.get(id)?.as_str()?.to_owned(),
    })
}

/// The page of merged templates, and the token of the next one. A template without a position is left out.
pub(super) fn page_of_templates(page: &Page, all: Vec<Value>) -> (Vec<Value>, Option<String>) {
    let items = all
        .into_iter()
        .filter_map(|item| Some((position_in(&item, "createdAt", "templateID")?, item)));
    let (shown, token) = page.cut(items.collect(), |(position, _)| position.clone());
    (shown.into_iter().map(|(_, item)| item).collect(), token)
}

/// Positions as a header field of a response: `AT:ID,AT:ID`.
pub(super) fn write_positions(positions: &[Position]) -> String {
    let texts = positions.iter().map(|p| format!("{}:{}", p.at, p.id));
    texts.collect::<Vec<_>>().join(",")
}

pub(super) fn read_positions(text: &str) -> Option<Vec<Position>> {
    let texts = text.split(',').filter(|text| !text.is_empty());
    let positions = texts.map(|text| {
        let (at, id) = text.split_once(':')?;
        Some(Position {
            at: at.parse().ok()?,
            id: id.to_owned(),
        })
    });
    positions.collect()
}

/// The older list of sandboxes: all of them, latest first.
pub(super) fn latest_first(parts: Vec<Vec<Value>>) -> Vec<Value> {
    let mut all: Vec<Value> = parts.into_iter().flatten().collect();
    all.sort_by_cached_key(|item| std::cmp::Reverse(position(item)));
    all
}

/// Merges templates by id: an installed template and a copy have the same id on every node. Adds up the counts of
/// creates. Of several versions, uses the one with the most builds, which is the home's.
pub(super) fn templates(parts: Vec<Vec<Value>>) -> Vec<Value> {
    let mut merged: Vec<Value> = Vec::new();
    for item in parts.into_iter().flatten() {
        let id = item.get("templateID").cloned();
        let same = |known: &&mut Value| known.get("templateID") == id.as_ref();
        match merged.iter_mut().find(same) {
            None => merged.push(item),
            Some(known) => {
                let count = |item: &Value| item["spawnCount"].as_u64().unwrap_or(0);
                let sum = count(known).saturating_add(count(&item));
                let builds = |item: &Value| item["buildCount"].as_u64().unwrap_or(0);
                if builds(&item) > builds(known) {
                    *known = item;
                }
                known["spawnCount"] = sum.into();
            }
        }
    }
    merged
}

/// Merges metrics: an object of objects by sandbox.
pub(super) fn metrics(parts: Vec<Value>) -> Value {
    let mut all = Map::new();
    for part in parts {
        let Value::Object(part) = part else { continue };
        for (key, value) in part {
            match (all.get_mut(&key), value) {
                (Some(Value::Object(known)), Value::Object(more)) => known.extend(more),
                (_, value) => {
                    all.insert(key, value);
                }
            }
        }
    }
    Value::Object(all)
}

/// The names of nodes whose items are missing in a merged response.
pub(super) fn missing(nodes: &BTreeSet<String>) -> Option<String> {
    let names: Vec<_> = nodes.iter().map(String::as_str).collect();
    (!names.is_empty()).then(|| names.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::query::Query;
    use proptest::prelude::*;
    use serde_json::json;

    fn wanted(limit: usize, order: &str, token: Option<&String>) -> Page {
        let token = token.map_or(String::new(), |token| format!("&nextToken={token}"));
        Page::of(&Query::parse(&format!(
            "limit={limit}&order={order}{token}"
        )))
        .unwrap()
    }

    fn item((at, id): (u64, u8)) -> Value {
        json!({"startedAt": Timestamp::from_unix_ns(at * 1_000_000), "sandboxID": id.to_string()})
    }

    /// A node's response.
    fn part(page: &Page, items: &[(u64, u8)]) -> Part {
        let items: Vec<_> = items.iter().copied().map(item).collect();
        let (shown, token) = page.cut(items, |item| position(item).unwrap());
        Part {
            positions: shown.iter().map(|item| position(item).unwrap()).collect(),
            items: shown,
            has_more: token.is_some(),
        }
    }

    proptest! {
        #[test]
        fn pages_of_several_nodes_are_those_of_one(
            times in prop::collection::vec((0_u64..6, 0_usize..3), 0..40), limit in 1_usize..8, asc: bool
        ) {
            let mut nodes = vec![Vec::new(); 3];
            let mut all = Vec::new();
            for ((at, node), id) in times.into_iter().zip(0_u8..) {
                nodes[node].push((at, id));
                all.push((at, id));
            }
            let order = if asc { "asc" } else { "desc" };
            let (mut token, mut expected_token) = (None, None);
            for _ in 0..=all.len() {
                let asked = wanted(limit, order, token.as_ref());
                let parts = nodes.iter().map(|items| part(&asked, items)).collect();
                let (shown, next) = page(&asked, parts);
                let one = wanted(limit, order, expected_token.as_ref());
                let (expected, expected_next) = page(&one, vec![part(&one, &all)]);
                prop_assert_eq!(shown, expected);
                prop_assert_eq!(&next, &expected_next);
                (token, expected_token) = (next, expected_next);
                if token.is_none() {
                    return Ok(());
                }
            }
            prop_assert!(false, "the list has no last page");
        }
    }

    #[test]
    fn a_node_with_further_items_makes_a_next_page() {
        let asked = wanted(2, "desc", None);
        let full = part(&asked, &[(1, 1), (2, 2), (3, 3)]);
        let (shown, token) = page(&asked, vec![full, part(&asked, &[])]);
        assert!(shown.len() == 2 && token.is_some());
    }

    #[test]
    fn positions_survive_their_field() {
        let positions = vec![
            Position {
                at: 7,
                id: "a".to_owned(),
            },
            Position {
                at: 9,
                id: "b".to_owned(),
            },
        ];
        assert_eq!(
            read_positions(&write_positions(&positions)),
            Some(positions)
        );
        assert_eq!(read_positions(""), Some(Vec::new()));
        assert_eq!(read_positions("x"), None);
    }

    #[test]
    fn a_template_of_every_node_is_listed_once() {
        let base = |count: u64, builds: u64| json!({"templateID": "base", "spawnCount": count, "buildCount": builds});
        let merged = templates(vec![
            vec![base(1, 1)],
            vec![base(2, 3), json!({"templateID": "x"})],
            vec![base(4, 1)],
        ]);
        assert_eq!(merged.len(), 2);
        assert_eq!(merged[0], base(7, 3));
    }

    #[test]
    fn templates_of_all_nodes_have_pages() {
        let item = |at: u64, id: &str| json!({"templateID": id, "createdAt": Timestamp::from_unix_ns(at * 1_000_000)});
        let all = || vec![item(1, "a"), item(3, "b"), item(3, "c")];
        let (shown, token) = page_of_templates(&wanted(2, "desc", None), all());
        assert_eq!(shown, [item(3, "c"), item(3, "b")]);
        let (shown, token) = page_of_templates(&wanted(2, "desc", token.as_ref()), all());
        assert_eq!((shown, token), (vec![item(1, "a")], None));
    }

    #[test]
    fn metrics_are_joined() {
        let parts = vec![
            json!({"sandboxes": {"a": 1}}),
            json!({"sandboxes": {"b": 2}}),
        ];
        assert_eq!(metrics(parts), json!({"sandboxes": {"a": 1, "b": 2}}));
    }
}
