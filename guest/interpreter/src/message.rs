//! The protocol between the server and a host on the control socket.
//!
//! The server sends one request per cell, in one of two encodings ([`Dialect`]). As JSON, one line:
//! `{"n":3,"code":"…","env":{…},"base":{…},"seed":true,"unstored":true}`. `env` applies to this cell only. `base`, sent
//! when it has changed, is the sandbox's environment from now on. `seed` means that random state must be reseeded,
//! because the host has not been seeded since the clone got its identity. An `unstored` cell takes no number and leaves
//! nothing in the history.
//!
//! As fields, each ended by a zero byte: `seed` or empty; the number of base variables, or empty if they have not
//! changed, then each as `NAME=value`; the number of the cell's variables, then each; the code.
//!
//! A host with an event loop also gets `{"interrupt":true}`, which interrupts the running cell.
//!
//! A host sends lines: `{"ready":true}` once, `{"done":true}` after each cell, and between them the events of the
//! response, which begin with `{"type":` and are passed on unread.

use serde::{Deserialize, Serialize};

use crate::clone_state::Variables;

/// The encoding of requests to a host. All hosts answer in the same format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// One line of JSON.
    Json,
    /// Fields that each end with a zero byte, for hosts without a JSON parser.
    Fields,
}

/// Makes a host with an event loop interrupt its cell.
pub(crate) const INTERRUPT: &[u8] = b"{\"interrupt\":true}\n";

/// A cell to run.
#[derive(Debug, Serialize)]
pub(crate) struct Run<'a> {
    /// Number of the cell in its context.
    pub(crate) n: u64,
    pub(crate) code: &'a str,
    #[serde(skip_serializing_if = "Variables::is_empty")]
    pub(crate) env: &'a Variables,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<&'a Variables>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) seed: bool,
    /// Absent from [`Dialect::Fields`]: a shell keeps no history of results.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) unstored: bool,
}

impl Run<'_> {
    pub(crate) fn encode(&self, dialect: Dialect) -> Vec<u8> {
        match dialect {
            Dialect::Json => {
                // Serializing strings and numbers cannot fail.
                let mut line = serde_json::to_vec(self).unwrap_or_default();
                line.push(b'\n');
                line
            }
            Dialect::Fields => self.fields(),
        }
    }

    fn fields(&self) -> Vec<u8> {
        let mut fields = vec![if self.seed { "seed" } else { "" }.to_owned()];
        match self.base {
            Some(base) => push_variables(&mut fields, base),
            None => fields.push(String::new()),
        }
        push_variables(&mut fields, self.env);
        fields.push(self.code.to_owned());
        let mut bytes = Vec::new();
        for field in fields {
            // Shell variables cannot contain zero bytes, and a zero byte would end the field early.
            bytes.extend(field.bytes().filter(|byte| *byte != 0));
            bytes.push(0);
        }
        bytes
    }
}

fn push_variables(fields: &mut Vec<String>, variables: &Variables) {
    let named: Vec<_> = variables.iter().filter(|(name, _)| is_name(name)).collect();
    fields.push(named.len().to_string());
    fields.extend(named.iter().map(|(name, value)| format!("{name}={value}")));
}

/// Whether a shell accepts the name for a variable.
pub(crate) fn is_name(name: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    !name.is_empty() && name.bytes().all(good) && !name.starts_with(|c: char| c.is_ascii_digit())
}

/// A cell as the bridge to Jupyter kernels reads it.
#[derive(Debug, Deserialize)]
pub(crate) struct Request {
    pub(crate) code: String,
    #[serde(default)]
    pub(crate) env: Variables,
    pub(crate) base: Option<Variables>,
    #[serde(default)]
    pub(crate) seed: bool,
    #[serde(default)]
    pub(crate) unstored: bool,
}

/// A line of a host, without its end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// An event, which is passed on.
    Event,
    Ready,
    Done,
    /// Anything else, which is dropped.
    Unknown,
}

/// Classifies a line.
pub(crate) fn classify(line: &[u8]) -> Line {
    match line {
        b"{\"done\":true}" => Line::Done,
        b"{\"ready\":true}" => Line::Ready,
        _ if line.starts_with(b"{\"type\":") && line.ends_with(b"}") => Line::Event,
        _ => Line::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run<'a>(code: &'a str, env: &'a Variables, base: Option<&'a Variables>) -> Run<'a> {
        Run {
            n: 1,
            code,
            env,
            base,
            seed: false,
            unstored: false,
        }
    }

    #[test]
    fn a_plain_cell_sends_only_number_and_code() {
        let none = Variables::new();
        let line = run("1+1", &none, None).encode(Dialect::Json);
        assert_eq!(line, b"{\"n\":1,\"code\":\"1+1\"}\n");
    }

    #[test]
    fn only_events_are_passed_on() {
        assert_eq!(classify(b"{\"type\":\"result\"}"), Line::Event);
        assert_eq!(classify(b"{\"done\":true}"), Line::Done);
        for other in [&b""[..], b"{}", b"{\"type\":", b" {\"type\":1}"] {
            assert_eq!(classify(other), Line::Unknown);
        }
    }

    proptest! {
        #[test]
        fn a_request_is_one_line(code in any::<String>(), value in any::<String>()) {
            let env = Variables::from([("A".to_owned(), value)]);
            let line = run(&code, &env, Some(&env)).encode(Dialect::Json);
            prop_assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
            prop_assert_eq!(line.last(), Some(&b'\n'));
        }

        #[test]
        fn counts_of_variables_match_the_fields(code in any::<String>(), names in prop::collection::vec("[A-Za-z_ =1-3]{0,4}", 0..5)) {
            let env: Variables = names.into_iter().map(|name| (name, "v\0w".to_owned())).collect();
            let bytes = run(&code, &env, None).encode(Dialect::Fields);
            let fields: Vec<&[u8]> = bytes.split(|byte| *byte == 0).collect();
            let count: usize = std::str::from_utf8(fields[2]).unwrap().parse().unwrap();
            // seed, base, count, the variables, the code, and nothing after the last zero byte.
            prop_assert_eq!(fields.len(), 3 + count + 2);
            prop_assert!(fields[3..3 + count].iter().all(|field| field.ends_with(b"=vw")));
        }
    }
}
