//! The configuration of the installed server, as far as it affects checks.

use std::{path::PathBuf, process::Command};

use model::STATE_DIR;
use serde_json::Value;

use super::{DoctorArgs, Finding, Verdict};
use crate::key::program;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) state: PathBuf,
    /// Directory of installed templates, if set.
    pub(super) templates: Option<PathBuf>,
    /// First address to listen on.
    pub(super) listen: Option<String>,
    pub(super) has_tls: bool,
    /// Blocks that the operator denies to all sandboxes.
    pub(super) denied: Vec<String>,
    has_no_network: bool,
    allows_missing_limits: bool,
}

impl Options {
    /// Asks `cube-api` for the configuration. Mistakes in it are a finding; without the program, which is a finding of
    /// its own, the defaults count.
    pub(super) fn load(args: &DoctorArgs) -> (Self, Option<Finding>) {
        let mut check = Command::new(program());
        check
            .args(["config", "check", "--format", "json"])
            .args(&args.config);
        let (values, finding) = match check.output() {
            Err(_) => (Value::Null, None),
            Ok(done) if done.status.success() => (
                serde_json::from_slice(&done.stdout).unwrap_or_default(),
                None,
            ),
            Ok(done) => {
                let why = String::from_utf8_lossy(&done.stderr).trim().to_owned();
                let finding = Finding::missing(
                    "configuration",
                    why,
                    "correct it, then run `cube server config check`",
                );
                (Value::Null, Some(finding))
            }
        };
        let mut options = Self::of(&values);
        if let Some(state) = &args.state {
            options.state.clone_from(state);
        }
        (options, finding)
    }

    /// `checked` is the document of `cube-api config check`.
    fn of(checked: &Value) -> Self {
        let items = checked["items"].as_array().map_or(&[][..], Vec::as_slice);
        let value = |key: &str| {
            let item = items.iter().find(|item| item["key"] == key);
            item.map_or(&Value::Null, |item| &item["value"])
        };
        let text = |key: &str| value(key).as_str().map(str::to_owned);
        let texts = |key: &str| {
            let list = value(key).as_array().into_iter().flatten();
            list.filter_map(|item| item.as_str().map(str::to_owned))
        };
        Self {
            state: text("server.state").map_or_else(|| STATE_DIR.into(), PathBuf::from),
            templates: text("pool.templates").map(PathBuf::from),
            listen: texts("server.listen").next(),
            has_tls: text("tls.certificate").is_some(),
            denied: texts("network.denied").collect(),
            has_no_network: value("network.mode") == "none",
            allows_missing_limits: value("sandbox.allow_missing_limits") == true,
        }
    }

    /// Addresses that the operator denies, if any.
    pub(super) fn denied_addresses(&self) -> Option<Finding> {
        let found = || format!("denied to all sandboxes: {}", self.denied.join(", "));
        (!self.denied.is_empty()).then(|| Finding::ok("denied", found()))
    }

    /// Adapts a finding to a server with these options.
    pub(super) fn applied(&self, finding: Finding) -> Finding {
        let option = match finding.check {
            "kernel" | "tun" | "ebpf" if self.has_no_network => "network.mode",
            "cgroups" if self.allows_missing_limits => "sandbox.allow_missing_limits",
            _ => return finding,
        };
        match finding.verdict {
            Verdict::Ok | Verdict::Warning => finding,
            Verdict::Missing => Finding {
                verdict: Verdict::Warning,
                found: format!("{} (allowed by `{option}`)", finding.found),
                ..finding
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(keys: &[(&str, Value)]) -> Options {
        let items = keys
            .iter()
            .map(|(key, value)| json!({"key": key, "value": value}));
        Options::of(&json!({"items": items.collect::<Vec<_>>()}))
    }

    #[test]
    fn values_of_the_configuration_count() {
        let options = of(&[
            ("server.state", "/srv/cube".into()),
            ("pool.templates", "/srv/t".into()),
            ("server.listen", json!(["[::1]:8443"])),
            ("tls.certificate", "/x".into()),
            ("network.mode", "none".into()),
            ("sandbox.allow_missing_limits", true.into()),
        ]);
        assert_eq!(options.state, PathBuf::from("/srv/cube"));
        assert_eq!(options.templates, Some(PathBuf::from("/srv/t")));
        assert_eq!(options.listen.as_deref(), Some("[::1]:8443"));
        assert!(options.has_tls);
        for check in ["kernel", "tun", "ebpf", "cgroups", "kvm"] {
            let found = options.applied(Finding::missing(check, "x", "y"));
            let expected = if check == "kvm" {
                Verdict::Missing
            } else {
                Verdict::Warning
            };
            assert_eq!(found.verdict, expected, "{check}");
        }
        let denied = of(&[("network.denied", json!(["203.0.113.0/24", "0.0.0.0/0:25"]))]);
        let found = denied.denied_addresses().unwrap();
        assert_eq!(found.verdict, Verdict::Ok);
        assert!(
            found.found.ends_with("203.0.113.0/24, 0.0.0.0/0:25"),
            "{found:?}"
        );
        let usual = Options::of(&Value::Null);
        assert_eq!(usual.denied_addresses(), None);
        assert_eq!(usual.state, PathBuf::from(STATE_DIR));
        let missing = Finding::missing("kernel", "x", "y");
        assert_eq!(usual.applied(missing.clone()), missing);
    }

    #[test]
    fn a_named_state_directory_replaces_that_of_the_configuration() {
        // There is no `cube-api` next to a test, so the defaults count.
        let (options, _) = Options::load(&DoctorArgs {
            state: Some("/other".into()),
            config: None,
            selftest: None,
        });
        assert_eq!(options.state, PathBuf::from("/other"));
    }
}
