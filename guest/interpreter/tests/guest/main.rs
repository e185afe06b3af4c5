//! The interpreter in clones of the template `code-interpreter-v1`: every kind of event and content, variables,
//! interrupts, and independent random state of clones. `cargo xtask test --tier interpreter` builds the template and
//! runs these tests.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod clone;
mod contexts;
mod identity;
mod kernels;
mod languages;
mod latency;
mod python;

use serde_json::Value;

/// The events of a type.
fn of_type<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events
        .iter()
        .filter(|event| event["type"] == kind)
        .collect()
}

/// The whole output of a stream.
fn text(events: &[Value], stream: &str) -> String {
    let printed = of_type(events, stream);
    printed
        .iter()
        .map(|event| event["text"].as_str().unwrap())
        .collect()
}

/// The value of the cell's last expression.
fn main_result(events: &[Value]) -> &Value {
    let results = of_type(events, "result");
    let main = results
        .into_iter()
        .find(|result| result["is_main_result"] == true);
    main.unwrap_or_else(|| panic!("no main result: {events:?}"))
}

/// The text of the main result.
fn main_text(events: &[Value]) -> String {
    main_result(events)["text"].as_str().unwrap().to_owned()
}

/// The error that ended the cell.
fn error(events: &[Value]) -> &Value {
    let errors = of_type(events, "error");
    assert_eq!(errors.len(), 1, "{events:?}");
    errors[0]
}
