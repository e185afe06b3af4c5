//! The options of the installed server that affect checks.

use std::{fs, io, path::PathBuf};

use model::STATE_DIR;

use super::{DoctorArgs, Finding, Verdict};

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
    /// Reads the options file. An absent file sets nothing; an unusable file is a finding.
    pub(super) fn load(args: &DoctorArgs) -> (Self, Option<Finding>) {
        let shown = args.config.display();
        let unusable = |found: String, cure: &str| {
            let finding = Finding::missing("options", found, cure);
            (Self::of(&[]), Some(finding))
        };
        let (mut options, finding) = match fs::read_to_string(&args.config) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => (Self::of(&[]), None),
            Err(why) => unusable(format!("{shown}: {why}"), "run as root"),
            Ok(text) => match model::options(&text) {
                Err(why) => unusable(format!("{shown}, {why}"), "correct the line"),
                Ok(lines) => (Self::of(&lines), None),
            },
        };
        if let Some(state) = &args.state {
            options.state.clone_from(state);
        }
        (options, finding)
    }

    fn of(lines: &[(&str, Option<&str>)]) -> Self {
        let line = |name: &str| lines.iter().find(|(found, _)| *found == name);
        let value = |name: &str| line(name).and_then(|(_, value)| *value);
        Self {
            state: value("state").unwrap_or(STATE_DIR).into(),
            templates: value("templates").map(PathBuf::from),
            listen: value("listen").map(str::to_owned),
            has_tls: line("tls-cert").is_some(),
            denied: (lines.iter())
                .filter(|(name, _)| *name == "network-deny")
                .filter_map(|(_, value)| value.map(str::to_owned))
                .collect(),
            has_no_network: value("network") == Some("none"),
            allows_missing_limits: line("allow-missing-limits").is_some(),
        }
    }

    /// Addresses that the operator denies, if any.
    pub(super) fn denied_addresses(&self) -> Option<Finding> {
        let found = || format!("denied to all sandboxes: {}", self.denied.join(", "));
        (!self.denied.is_empty()).then(|| Finding::ok("network-deny", found()))
    }

    /// Adapts a finding to a server with these options.
    pub(super) fn applied(&self, finding: Finding) -> Finding {
        let option = match finding.check {
            "kernel" | "tun" | "ebpf" if self.has_no_network => "network = none",
            "cgroups" if self.allows_missing_limits => "allow-missing-limits",
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
    use super::*;

    fn load(text: &str, state: Option<&str>) -> (Options, Option<Finding>) {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("server.conf");
        fs::write(&config, text).unwrap();
        let state = state.map(PathBuf::from);
        Options::load(&DoctorArgs {
            state,
            config,
            selftest: None,
        })
    }

    #[test]
    fn options_of_the_file_count() {
        let text = "state = /srv/cube\ntemplates = /srv/t\nlisten = [::1]:8443\ntls-cert = /x\nnetwork = none\nallow-missing-limits\n";
        let (options, finding) = load(text, None);
        assert_eq!(finding, None);
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
        let denied = load(
            "network-deny = 203.0.113.0/24\nnetwork-deny = 0.0.0.0/0:25\n",
            None,
        )
        .0;
        let found = denied.denied_addresses().unwrap();
        assert_eq!(found.verdict, Verdict::Ok);
        assert!(
            found.found.ends_with("203.0.113.0/24, 0.0.0.0/0:25"),
            "{found:?}"
        );
        let (usual, _) = load("", None);
        assert_eq!(usual.denied_addresses(), None);
        assert_eq!(usual.state, PathBuf::from(STATE_DIR));
        let missing = Finding::missing("kernel", "x", "y");
        assert_eq!(usual.applied(missing.clone()), missing);
        assert_eq!(load(text, Some("/other")).0.state, PathBuf::from("/other"));
        let (_, finding) = load("rate = 1\nno option\n", None);
        assert!(finding.unwrap().found.contains("line 2"));
    }
}
