use proptest::prelude::*;
use serde_json::json;

use super::*;

fn parse(rules: Json) -> Result<Rules, RuleError> {
    Rules::parse(&serde_json::from_value(rules).unwrap())
}

fn headers(headers: Json) -> Json {
    json!([{"transform": {"headers": headers}}])
}

fn message(rules: Json) -> String {
    match parse(rules).unwrap_err() {
        RuleError::Invalid(why) => why,
        RuleError::Unsupported(why) => format!("501 {why}"),
    }
}

fn secret(name: &str) -> Result<Value, String> {
    match name {
        "key" => Ok(Value::of_test("hunter2")),
        "line" => Ok(Value::of_test("hunter2\n")),
        _ => Err(format!("secret {name:?} was not found")),
    }
}

#[test]
fn the_exact_host_applies_then_the_longest_suffix() {
    let rules = parse(json!({
        "api.example.com": headers(json!({"a": "exact"})),
        "*.example.com": headers(json!({"a": "short"})),
        "*.b.example.com": headers(json!({"a": "long"})),
        "plain.example.com": [],
        "Other.TEST.": headers(json!({"a": "other"})),
    }))
    .unwrap();
    let key = |host: &str| rules.find(host).map(Rule::key);
    assert_eq!(key("api.example.com"), Some("api.example.com"));
    assert_eq!(key("x.api.example.com"), Some("*.example.com"));
    assert_eq!(key("x.b.example.com"), Some("*.b.example.com"));
    assert_eq!(key("b.example.com"), Some("*.example.com"));
    assert_eq!(key("example.com"), None);
    assert_eq!(key("badexample.com"), None);
    assert_eq!(key("other.test"), Some("other.test"));
    let ruled: Vec<String> = rules.ruled().into_iter().map(String::from).collect();
    assert!(ruled.contains(&"*.b.example.com".to_owned()) && ruled.len() == 5);
}

#[test]
fn a_rule_without_headers_hides_others_and_is_for_the_proxy() {
    for empty in [
        json!([]),
        json!([{}]),
        json!([{"transform": null}]),
        json!([{"transform": {"headers": null}}]),
        headers(json!({})),
    ] {
        let rules = json!({"*.test": headers(json!({"a": "b"})), "a.test": empty});
        let rules = parse(rules).unwrap();
        assert_eq!(rules.ruled().len(), 2, "{empty}");
        let rule = rules.find("a.test").unwrap();
        let expected = RuleOutcome::Headers {
            rule: "a.test".to_owned(),
            headers: Vec::new(),
            secrets: Vec::new(),
        };
        assert_eq!(rule.outcome(), expected, "{empty}");
        assert_eq!(rule.fill(secret), expected, "{empty}");
    }
}

#[test]
fn headers_leave_in_clear_text_only_if_the_rule_says_so() {
    let transform = json!({"headers": {"a": "${e2b.secrets.key}"}});
    let in_clear = |rules: Json| {
        let rules = parse(json!({"a.test": rules})).unwrap();
        // With TLS the option has no effect.
        let rule = rules.find("a.test").unwrap();
        let outcome = rule.answer(Ask::Headers, secret);
        assert!(matches!(outcome, RuleOutcome::Headers { .. }));
        rule.answer(Ask::HeadersInClear, secret)
    };
    let refused = RuleOutcome::NeedsTls {
        rule: "a.test".to_owned(),
    };
    for plain in [json!(null), json!(false)] {
        let rules = json!([{"transform": transform, "plain": plain}]);
        assert_eq!(in_clear(rules), refused, "{plain}");
    }
    assert_eq!(in_clear(json!([{"transform": transform}])), refused);
    for allowed in [
        json!([{"transform": transform, "plain": true}]),
        json!([{"plain": true}, {"transform": transform}]),
        // Without headers, nothing leaves.
        json!([]),
        json!([{"plain": false}]),
    ] {
        let outcome = in_clear(allowed.clone());
        assert!(matches!(outcome, RuleOutcome::Headers { .. }), "{allowed}");
    }
}

#[test]
fn a_mask_hides_all_texts_of_headers_and_keeps_placeholders_and_the_form() {
    let rules = json!({
        "a.test": headers(json!({"a": "Bearer hunter2", "b": "x ${e2b.secrets.KEY} hunter2 ${HOME}", "c": "${e2b.secrets."})),
        "*.b.test": [],
        "c.test": [{"transform": {"headers": {"d": ["hunter2", {"e": "hunter2"}]}, "other": "kept"}}],
    });
    let mut network = NetworkConfig {
        rules: serde_json::from_value(rules).unwrap(),
        ..NetworkConfig::default()
    };
    mask(&mut network);
    let expected = json!({
        "a.test": headers(json!({"a": "***", "b": "***${e2b.secrets.key}***", "c": "***"})),
        "*.b.test": [],
        "c.test": [{"transform": {"headers": {"d": ["***", {"e": "***"}]}, "other": "kept"}}],
    });
    assert_eq!(json!(network.rules), expected);
}

#[test]
fn placeholders_are_filled_at_the_request() {
    let rules = parse(json!({"a.test": headers(json!({
        "Authorization": "Bearer ${e2b.secrets.KEY}:${e2b.secrets.key} ${HOME} $",
        "x-plain": "p",
    }))}));
    let rules = rules.unwrap();
    let rule = rules.find("a.test").unwrap();
    let RuleOutcome::Headers {
        rule: key,
        headers,
        secrets,
    } = rule.fill(secret)
    else {
        panic!("no headers");
    };
    assert_eq!((key.as_str(), secrets), ("a.test", vec!["key".to_owned()]));
    let expected = [
        ("authorization", "Bearer hunter2:hunter2 ${HOME} $"),
        ("x-plain", "p"),
    ];
    assert_eq!(headers, expected.map(|(n, v)| (n.to_owned(), v.to_owned())));
    assert!(!format!("{rules:?}").contains("hunter2"));
    let RuleOutcome::Headers { headers, .. } = rule.outcome() else {
        panic!("no rule");
    };
    assert!(headers.is_empty());
}

#[test]
fn an_unknown_secret_or_one_with_a_line_end_fails_the_request() {
    for (name, part) in [("none", "\"none\" was not found"), ("line", "a line end")] {
        let rules =
            parse(json!({"*.test": headers(json!({"a": format!("${{e2b.secrets.{name}}}")}))}));
        let rules = rules.unwrap();
        match rules.find("a.test").unwrap().fill(secret) {
            RuleOutcome::Failed { rule, reason } => {
                assert_eq!(rule, "*.test");
                assert!(
                    reason.contains(part) && !reason.contains("hunter2"),
                    "{reason}"
                );
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn wrong_rules_are_refused_by_name() {
    let value = |value: &str| json!({"a.test": headers(json!({"x": value}))});
    for malformed in [
        "${e2b.secrets.}",
        "${e2b.secrets.a b}",
        "${e2b.secrets.sec_1}",
        "${e2b.secrets.a",
        "${e2b.secret.a}",
        "${e2b}",
        "${e2b.secrets.${e2b.secrets.a}}",
    ] {
        let why = message(value(&format!("Bearer {malformed}")));
        assert!(
            why.contains("malformed placeholder") && why.contains("a.test"),
            "{why}"
        );
    }
    let why = message(value("${e2b.identity.tokens.aws}"));
    assert!(
        why.starts_with("501 ") && why.contains("${e2b.identity.tokens.aws}"),
        "{why}"
    );
    for (name, part) in [
        ("Host", "host"),
        ("content-length", "content-length"),
        ("TRANSFER-ENCODING", "transfer-encoding"),
        (":authority", ":authority"),
        ("a b", "a b"),
        ("", "\"\""),
    ] {
        let why = message(json!({"a.test": headers(json!({name: "v"}))}));
        assert!(why.contains(part), "{why}");
    }
    let many: Map<String, Json> = (0..33)
        .map(|n| (format!("h{n}"), json!(format!("${{e2b.secrets.s{n}}}"))))
        .collect();
    for (rules, part) in [
        (json!({"*": []}), "\"*\""),
        (json!({"10.0.0.1": []}), "10.0.0.1"),
        (json!({"a.test:443": []}), "a.test:443"),
        (json!({"a.test": [], "A.test": []}), "twice"),
        (json!({"a.test": {}}), "list"),
        (json!({"a.test": [1]}), "objects"),
        (
            json!({"a.test": [{"transform": {"headers": []}}]}),
            "object",
        ),
        (json!({"a.test": [{"transform": {"path": "/"}}]}), "501 "),
        (json!({"a.test": [{"action": "deny"}]}), "\"action\""),
        (json!({"a.test": [{"plain": 1}]}), "true or false"),
        (json!({"a.test": [{"transform": {"plain": true}}]}), "501 "),
        (
            json!({"a.test": [{"transform": {"headers": {}}}, {"transform": {"headers": {}}}]}),
            "more than one transform",
        ),
        (value("a\r\nb: c"), "character"),
        (value("\u{7f}"), "character"),
        (json!({"a.test": headers(json!({"x": 1}))}), "text"),
        (
            json!({"a.test": headers(json!({"x": "1", "X": "2"}))}),
            "twice",
        ),
        (json!({"a.test": headers(Json::Object(many))}), "33 secrets"),
    ] {
        let why = message(rules.clone());
        assert!(why.contains(part), "{rules}: {why}");
    }
}

proptest! {
    #[test]
    fn no_value_panics_and_text_without_placeholders_stands_for_itself(text in "[ -~]{0,40}|(\\$\\{e2b|\\.secrets\\.|a|\\}|é){0,8}") {
        if let Ok(template) = Template::parse(&text) {
            let names: Vec<_> = template.secrets().map(str::to_owned).collect();
            let filled = template.fill(&|name| Ok(format!("${{e2b.secrets.{name}}}"))).unwrap();
            prop_assert_eq!(filled.to_lowercase(), text.to_lowercase());
            if !text.contains("${e2b") {
                prop_assert!(names.is_empty());
            }
        }
    }
}
