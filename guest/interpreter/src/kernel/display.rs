//! Converts display data of kernels (content by MIME type) to results for clients.

use serde_json::{Map, Value, json};

/// The keys of MIME types in results. Data of other types goes into `extra`, under the name of the type.
const KEYS: [(&str, &str); 12] = [
    ("text/plain", "text"),
    ("text/html", "html"),
    ("text/markdown", "markdown"),
    ("image/svg+xml", "svg"),
    ("image/png", "png"),
    ("image/jpeg", "jpeg"),
    ("application/pdf", "pdf"),
    ("text/latex", "latex"),
    ("application/json", "json"),
    ("application/javascript", "javascript"),
    ("e2b/data", "data"),
    ("e2b/chart", "chart"),
];

/// The origin of a result: the value of the cell's last expression, or a call that displays something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weight {
    Main,
    Aside,
}

/// The event line of a result, without the line end.
pub(crate) fn result(content: &Value, weight: Weight) -> String {
    let (mut fields, mut extra) = (Map::new(), Map::new());
    let none = Map::new();
    for (kind, value) in content["data"].as_object().unwrap_or(&none) {
        let value = joined(value);
        match KEYS.iter().find(|(known, _)| known == kind) {
            Some((_, "text")) => fields.insert("text".to_owned(), unquoted(value)),
            Some((_, key)) => fields.insert((*key).to_owned(), value),
            None => extra.insert(kind.clone(), value),
        };
    }
    if !extra.is_empty() {
        fields.insert("extra".to_owned(), Value::Object(extra));
    }
    let main = weight == Weight::Main;
    fields.insert("is_main_result".to_owned(), json!(main));
    // The server recognises events by their beginning, so `type` comes first.
    let rest = Value::Object(fields).to_string();
    format!("{{\"type\":\"result\",{}", rest.trim_start_matches('{'))
}

/// Joins a list of text pieces, which Jupyter allows in place of a text. Leaves any other value unchanged.
fn joined(value: &Value) -> Value {
    let pieces = value
        .as_array()
        .map(|pieces| pieces.iter().map(Value::as_str));
    match pieces.and_then(|pieces| pieces.collect::<Option<String>>()) {
        Some(text) => Value::String(text),
        None => value.clone(),
    }
}

/// Removes the quotes around a text, as official servers do.
fn unquoted(value: Value) -> Value {
    let inner = |quote: char| value.as_str()?.strip_prefix(quote)?.strip_suffix(quote);
    match inner('\'').or_else(|| inner('"')) {
        Some(text) => json!(text),
        None => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_types_get_the_keys_of_the_api() {
        let content =
            json!({"data": {"text/plain": "'a'", "text/html": ["<b>", "</b>"], "x/y": [1, "z"]}});
        let line = result(&content, Weight::Main);
        assert!(line.starts_with("{\"type\":\"result\","), "{line}");
        let read: Value = serde_json::from_str(&line).unwrap();
        let wanted = json!({
            "type": "result", "text": "a", "html": "<b></b>", "extra": {"x/y": [1, "z"]},
            "is_main_result": true,
        });
        assert_eq!(read, wanted);
        let nothing: Value = serde_json::from_str(&result(&json!({}), Weight::Aside)).unwrap();
        assert_eq!(nothing, json!({"type": "result", "is_main_result": false}));
    }
}
