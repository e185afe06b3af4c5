//! Entry points of the fuzz target `options`: bodies and query strings of the control plane.

use std::net::IpAddr;

use ::egress::control::RuleOutcome;
use netisolation::{DefaultEgress, ForbiddenAddresses};
use rest::{NetworkConfig, NetworkUpdate, NewSandbox};

use ::builds::{grant::Authority, request, store};

use crate::{network::Rewriting, rules::Rules, secrets::Value};

use super::{EgressConfig, network, paging::Page, query::Query};

/// Runs one fuzz input. The first byte selects the parser, which gets the remaining bytes.
///
/// # Panics
/// Panics if an invariant is violated.
pub fn options(bytes: &[u8]) {
    let Some((choice, bytes)) = bytes.split_first() else {
        return;
    };
    // Above the choices of the first release, so that older inputs keep their meaning.
    match choice {
        240 => return check_build(bytes),
        241 => return check_record(bytes),
        242 => return check_grant(&String::from_utf8_lossy(bytes)),
        _ => {}
    }
    match choice % 4 {
        0 => {
            if let Ok(options) = serde_json::from_slice(bytes) {
                check_options(&options);
            }
        }
        1 => {
            if let Ok(update) = serde_json::from_slice::<NetworkUpdate>(bytes) {
                check_options(&network::outbound(update));
            }
        }
        2 => {
            if let Ok(body) = serde_json::from_slice::<NewSandbox>(bytes) {
                check_options(&body.network.unwrap_or_default());
            }
        }
        _ => check_query(&String::from_utf8_lossy(bytes)),
    }
}

/// Checks the policy for `options` under every default policy: without internet access and `allowOut`, it must deny two
/// public addresses, and its DNS servers must be outside the forbidden ranges. Fuzzing builds also compare the contents
/// of the eBPF maps with the policy. On a server without network, no domain may be allowed.
fn check_options(options: &NetworkConfig) {
    for default in [DefaultEgress::Deny, DefaultEgress::Internet] {
        let egress = EgressConfig {
            default,
            forbidden: ForbiddenAddresses::default(),
            rewriting: Rewriting::On,
        };
        for access in [None, Some(false), Some(true)] {
            let Ok(policy) = network::policy_of(options, access, &egress) else {
                continue;
            };
            #[cfg(fuzzing)]
            netisolation::fuzz::check_policy(&policy);
            let closed = access == Some(false) && options.allow_out.is_none();
            let probes = ["8.8.8.8", "2600::1"].map(|a| a.parse::<IpAddr>());
            for address in probes.into_iter().flatten() {
                assert!(!(closed && policy.allows(address)), "{address}");
            }
            for server in &policy.dns_servers {
                assert!(!egress.forbidden.forbids(server.ip()), "{server}");
            }
        }
    }
    check_rules(options);
    let opened = network::grant(options, None, None);
    assert!(opened.is_err() || opened.is_ok_and(|policy| policy.names.is_empty()));
}

/// Checks that accepted rules apply to their own hosts only and produce valid headers.
fn check_rules(options: &NetworkConfig) {
    let Ok(rules) = Rules::parse(&options.rules.clone().unwrap_or_default()) else {
        return;
    };
    for pattern in rules.ruled() {
        let key = String::from(pattern);
        let host = key.replacen('*', "x", 1);
        let rule = rules
            .find(&host)
            .map(|rule| rule.fill(|_| Ok(Value::of_test("value"))));
        let Some(RuleOutcome::Headers { headers, .. }) = rule else {
            panic!("no rule for {key}");
        };
        for (name, value) in headers {
            assert!(!["host", "content-length", "transfer-encoding"].contains(&name.as_str()));
            assert!(!value.contains(['\r', '\n', '\0']), "{key}");
        }
    }
}

/// Checks the bodies of build requests: accepted names fit into the pool's names and are plain file names.
fn check_build(bytes: &[u8]) {
    if let Ok(body) = serde_json::from_slice(bytes)
        && let Ok(spec) = request::check_new(body)
    {
        for tag in &spec.tags {
            let name = format!("{}:{tag}", spec.name);
            assert!(name.len() <= 128 && !name.contains(char::is_control));
        }
    }
    if let Ok(body) = serde_json::from_slice(bytes)
        && let Ok(spec) = request::check_start(body)
    {
        for hash in spec.steps.iter().filter_map(|step| step.files.as_ref()) {
            assert!(hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_hexdigit()));
        }
    }
}

/// Checks the record of a template's builds: a parsed record survives a round trip.
fn check_record(bytes: &[u8]) {
    if let Ok(record) = store::parse(bytes) {
        let text = serde_json::json!({"format": 1, "template": record}).to_string();
        assert!(store::parse(text.as_bytes()).is_ok_and(|again| again == record));
    }
}

/// Checks that no query grants an upload without the server's key.
fn check_grant(query: &str) {
    let authority = Authority::new(&[7; 32]);
    let hash = "0".repeat(64);
    assert!(authority.verify("a", &hash, query, 0).is_err());
}

/// Checks the query strings of lists.
fn check_query(text: &str) {
    let query = Query::parse(text);
    let _read = (query.metadata(), query.list("state"), query.time("start"));
    if let Ok(page) = Page::of(&query) {
        let items: Vec<u64> = (0..8).collect();
        let (cut, _) = page.cut(items, |at| super::paging::Position {
            at: *at,
            id: String::new(),
        });
        assert!(cut.len() <= 8);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    /// Runs the stored inputs, which include all inputs that once failed.
    #[test]
    fn the_fuzz_seeds_pass() {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dev/fuzz/seeds/options");
        let mut read = 0;
        for seed in fs::read_dir(seeds).unwrap() {
            super::options(&fs::read(seed.unwrap().path()).unwrap());
            read += 1;
        }
        assert!(read > 0);
    }
}
