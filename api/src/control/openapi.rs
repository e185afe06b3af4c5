//! The OpenAPI document. `openapi.json` describes what an operation takes and answers, and this module adds what the list
//! of routes determines:
//!
//! ```text
//! path parameters                from the path
//! 401, 403, 429, 500             unless the route is public; a public one has an empty `security`
//! 400                            with parameters or a body
//! 404                            with a path parameter
//! 413, 415                       with a body
//! 502, 503                       if another node may answer
//! Idempotency-Key                of creates
//! ```
//! `refusals` lists other statuses. `body` names a schema, or a media type other than JSON; with a `?` at its end, the body
//! is optional. An answer names a schema, a list of one, or is null without a body. `query` and `headers` name entries of
//! `components`.

use std::{collections::BTreeSet, sync::LazyLock};

use serde_json::{Map, Value, json};

use super::{
    endpoint::{Access, Endpoint},
    endpoints,
    spread::Spread,
};

const SHORT: &str = include_str!("openapi.json");

/// The document as it is served.
pub(super) static TEXT: LazyLock<String> = LazyLock::new(|| document().to_string());

pub(super) fn document() -> Value {
    let mut document: Value = serde_json::from_str(SHORT).unwrap_or_default();
    for endpoint in endpoints() {
        if let Some(operation) = document["paths"][endpoint.path].get_mut(endpoint.method) {
            *operation = complete(operation, &endpoint);
        }
    }
    document
}

fn complete(short: &Value, endpoint: &Endpoint) -> Value {
    let is_public = endpoint.access == Access::Public;
    let from_path = path_parameters(endpoint.path);
    let query = strings(&short["query"]).map(|name| reference("parameters", name));
    let mut parameters: Vec<_> = from_path.iter().cloned().chain(query).collect();
    if endpoint.spread == Spread::Create {
        parameters.push(reference("parameters", "IdempotencyKey"));
    }

    let mut refusals: BTreeSet<u64> = BTreeSet::new();
    let listed = short["refusals"].as_array().into_iter().flatten();
    refusals.extend(listed.filter_map(Value::as_u64));
    let body = short["body"].as_str();
    for (applies, statuses) in [
        (!is_public, &[401, 403, 429, 500][..]),
        (!parameters.is_empty() || body.is_some(), &[400]),
        (!from_path.is_empty(), &[404]),
        (body.is_some(), &[413]),
        (body.is_some() && !is_public, &[415]),
        (endpoint.spread != Spread::Own, &[502, 503]),
    ] {
        refusals.extend(statuses.iter().filter(|_| applies));
    }

    let mut responses = Map::new();
    for (status, answer) in short["answers"].as_object().into_iter().flatten() {
        responses.insert(status.clone(), response(status, answer, &short["headers"]));
    }
    for status in refusals {
        responses.insert(status.to_string(), reference("responses", "Error"));
    }
    let mut operation = json!({
        "summary": short["summary"],
        "parameters": parameters,
        "responses": responses,
    });
    if let Some(body) = body {
        operation["requestBody"] = request_body(body);
    }
    if is_public {
        operation["security"] = json!([]);
    }
    operation
}

/// The parameters in braces. Components describe those with a form of their own.
fn path_parameters(path: &str) -> Vec<Value> {
    let names = path
        .split('{')
        .skip(1)
        .filter_map(|rest| rest.split('}').next());
    let parameter = |name: &str| match name {
        "hash" => reference("parameters", name),
        _ => json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}),
    };
    names.map(parameter).collect()
}

fn request_body(body: &str) -> Value {
    let (schema, is_required) = match body.strip_suffix('?') {
        Some(schema) => (schema, false),
        None => (body, true),
    };
    let content = if schema.contains('/') {
        json!({schema: {}})
    } else {
        json!({"application/json": {"schema": reference("schemas", schema)}})
    };
    json!({"required": is_required, "content": content})
}

fn response(status: &str, answer: &Value, headers: &Value) -> Value {
    let description = match status {
        "201" => "created",
        "202" => "accepted",
        _ => "success",
    };
    let schema = match answer {
        Value::String(schema) => reference("schemas", schema),
        Value::Array(_) => {
            let item = answer[0].as_str().unwrap_or_default();
            json!({"type": "array", "items": reference("schemas", item)})
        }
        _ => return json!({"description": format!("{description}, no body")}),
    };
    let mut response = json!({
        "description": description,
        "content": {"application/json": {"schema": schema}},
    });
    for name in strings(headers) {
        response["headers"][name] = reference("headers", name);
    }
    response
}

fn reference(kind: &str, name: &str) -> Value {
    json!({"$ref": format!("#/components/{kind}/{name}")})
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The operations in the document: method, path, and whether the operation is public.
    fn documented(document: &Value) -> BTreeSet<(String, String, bool)> {
        let paths = document["paths"].as_object().unwrap();
        let operations = paths.iter().flat_map(|(path, operations)| {
            let methods = operations.as_object().unwrap().iter();
            methods.map(move |(method, operation)| {
                let is_public = operation["security"].as_array().is_some_and(Vec::is_empty);
                (method.clone(), path.clone(), is_public)
            })
        });
        operations.collect()
    }

    #[test]
    fn the_openapi_document_lists_exactly_the_routes() {
        let served: BTreeSet<_> = endpoints()
            .into_iter()
            .map(|e| {
                let is_public = e.access == Access::Public;
                (e.method.to_owned(), e.path.to_owned(), is_public)
            })
            .collect();
        let documented = documented(&document());
        let undocumented: Vec<_> = served.difference(&documented).collect();
        let unserved: Vec<_> = documented.difference(&served).collect();
        assert!(
            undocumented.is_empty() && unserved.is_empty(),
            "missing in the document: {undocumented:?}; not served: {unserved:?}"
        );
    }

    #[test]
    fn every_operation_declares_its_statuses() {
        let document = document();
        for (method, path, is_public) in documented(&document) {
            let operation = &document["paths"][&path][&method];
            let declares = |status: &str| operation["responses"].get(status).is_some();
            assert!(!declares("default"), "{method} {path}");
            let mut wanted = Vec::new();
            if !is_public {
                wanted.extend(["401", "403", "429"]);
            }
            if operation.get("requestBody").is_some() && !is_public {
                wanted.extend(["400", "413", "415"]);
            }
            for status in wanted {
                assert!(declares(status), "{method} {path}: {status}");
            }
        }
    }

    #[test]
    fn operations_in_short_form_have_no_unknown_key() {
        let short: Value = serde_json::from_str(SHORT).unwrap();
        for (method, path, _) in documented(&short) {
            let operation = short["paths"][&path][&method].as_object().unwrap();
            for key in operation.keys() {
                let known = ["summary", "query", "body", "answers", "headers", "refusals"];
                assert!(known.contains(&key.as_str()), "{method} {path}: {key}");
            }
        }
    }

    #[test]
    fn every_reference_in_the_openapi_document_resolves() {
        let document = document();
        let mut values = vec![&document];
        while let Some(value) = values.pop() {
            match value {
                Value::Object(object) => {
                    if let Some(reference) = object.get("$ref") {
                        let pointer = reference.as_str().unwrap().trim_start_matches('#');
                        assert!(document.pointer(pointer).is_some(), "{reference}");
                    }
                    values.extend(object.values());
                }
                Value::Array(array) => values.extend(array),
                _ => {}
            }
        }
    }

    #[test]
    fn operations_have_what_their_routes_determine() {
        let document = document();
        let create = &document["paths"]["/v2/sandboxes"]["post"];
        let key = reference("parameters", "IdempotencyKey");
        assert_eq!(create["parameters"], json!([key]));
        let statuses: Vec<_> = create["responses"].as_object().unwrap().keys().collect();
        assert_eq!(
            statuses,
            [
                "201", "400", "401", "403", "404", "409", "413", "415", "422", "429", "500", "501",
                "502", "503", "507"
            ]
        );
        let upload = &document["paths"]["/templates/{id}/files/{hash}"]["put"];
        assert_eq!(upload["security"], json!([]));
        assert!(upload["responses"].get("401").is_none());
        let body = &document["paths"]["/sandboxes/{id}/pause"]["post"]["requestBody"];
        assert_eq!(body["required"], false);
        let health = &document["paths"]["/health"]["get"]["responses"];
        assert_eq!(health, &json!({"200": {"description": "success, no body"}}));
    }
}
