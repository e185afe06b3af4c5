//! Options and options files of releases before the configuration file. They work for one more release, with a warning
//! that names the key: delete this module, and the calls of it, after that release.
//!
//! An options file has one option per line, without dashes: `max-sandboxes = 64`, `insecure-loopback`.

use std::{ffi::OsString, path::Path};

use super::{
    Failure,
    layers::{Mistake, Source},
    schema,
};

/// Commands that accept all keys.
const COMMANDS: [&str; 3] = ["serve", "prepare", "end"];
/// Options that remain.
const KEPT: [&str; 6] = [
    "listen",
    "state",
    "templates",
    "domain",
    "insecure-loopback",
    "cluster",
];
/// Each option, without its dashes, and its key.
pub(super) const OPTIONS: [(&str, &str); 59] = [
    ("listen", "server.listen"),
    ("state", "server.state"),
    ("domain", "server.domain"),
    ("trusted-proxy", "server.trusted_proxies"),
    ("insecure-loopback", "server.insecure_loopback"),
    ("rate", "server.rate"),
    ("server-memory", "server.memory"),
    ("secrets-key", "server.secrets_key"),
    ("on-exit", "server.on_exit"),
    ("log", "server.log"),
    ("reports", "server.reports"),
    ("tls-cert", "tls.certificate"),
    ("tls-key", "tls.key"),
    ("templates", "pool.templates"),
    ("images", "pool.images"),
    ("vmm", "pool.vmm"),
    ("warm", "pool.warm"),
    ("warm-slots", "pool.warm_slots"),
    ("warm-memory", "pool.warm_memory"),
    ("max-sandboxes", "pool.max_sandboxes"),
    ("max-saved", "pool.max_saved"),
    ("memory-reserve", "pool.memory_reserve"),
    ("disk-reserve", "pool.disk_reserve"),
    ("template-quota", "pool.template_quota"),
    ("cpu-weight", "sandbox.cpu_weight"),
    ("cpu-millis", "sandbox.cpu_millis"),
    ("disk-limit", "sandbox.disk"),
    ("io-rate", "sandbox.io_rate"),
    ("network-rate", "sandbox.network_rate"),
    ("max-timeout", "sandbox.max_timeout"),
    ("allow-missing-limits", "sandbox.allow_missing_limits"),
    ("network", "network.mode"),
    ("uplink", "network.uplinks"),
    ("default-egress", "network.default_egress"),
    ("network-exception", "network.exceptions"),
    ("webhook-exception", "network.webhook_exceptions"),
    ("network-deny", "network.denied"),
    ("dns-server", "network.dns_servers"),
    ("egress-proxy", "egress.proxy"),
    ("egress-connections", "egress.connections"),
    ("egress-calls", "egress.log_calls"),
    ("alert-refusals", "alerts.refusals"),
    ("alert-command", "alerts.to"),
    ("alert-webhook", "alerts.to"),
    ("max-builds", "builds.concurrent"),
    ("build-cache", "builds.cache"),
    ("build-egress", "builds.egress"),
    ("upload-quota", "builds.uploads"),
    ("image-quota", "images.quota"),
    ("image-mirror", "images.mirrors"),
    ("image-exception", "images.exceptions"),
    ("image-credentials", "images.credentials"),
    ("image-converter", "images.converter"),
    ("image-userland", "images.userland"),
    ("node", "cluster.node"),
    ("cluster", "cluster.enabled"),
    ("transfer-rate", "cluster.transfer_rate"),
    ("otlp-endpoint", "traces.endpoint"),
    ("otlp-share", "traces.share"),
];

/// An option on the command line, and its value as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct FlagText {
    /// With its dashes, for messages.
    pub(super) flag: String,
    pub(super) key: String,
    pub(super) text: String,
    pub(super) is_earlier: bool,
}

impl FlagText {
    /// An option of [`OPTIONS`].
    pub(super) fn of(flag: &str, text: String) -> Self {
        let key = key_of(flag).unwrap_or(flag).to_owned();
        Self {
            flag: format!("--{flag}"),
            key,
            text,
            is_earlier: !KEPT.contains(&flag),
        }
    }

    /// The value of `--set`.
    pub(super) fn of_set(text: String) -> Self {
        let (key, value) = text.split_once('=').unwrap_or((&text, ""));
        Self {
            flag: "--set".to_owned(),
            key: key.trim().to_owned(),
            text: value.trim().to_owned(),
            is_earlier: false,
        }
    }
}

fn key_of(option: &str) -> Option<&'static str> {
    let found = OPTIONS.iter().find(|(name, _)| *name == option);
    found.map(|(_, key)| *key)
}

/// Takes the options of earlier releases off the command line.
///
/// # Errors
/// Returns an error if such an option has no value.
pub(in super::super) fn take(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<(Vec<OsString>, Vec<FlagText>), Failure> {
    let mut arguments = arguments.into_iter();
    let (mut rest, mut taken) = (Vec::new(), Vec::new());
    rest.extend(arguments.by_ref().take(2));
    let command = rest.get(1).and_then(|word| word.to_str());
    if !command.is_some_and(|word| COMMANDS.contains(&word)) {
        rest.extend(arguments);
        return Ok((rest, taken));
    }
    while let Some(argument) = arguments.next() {
        let option = argument.to_str().and_then(|text| text.strip_prefix("--"));
        let parts = option.map(|option| match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        });
        let Some((name, value)) = parts.filter(|(name, _)| is_gone(name)) else {
            rest.push(argument);
            continue;
        };
        let text = match value {
            Some(value) => value.to_owned(),
            None if is_switch(name) => "true".to_owned(),
            None => {
                let next = arguments.next().and_then(|next| next.into_string().ok());
                next.ok_or_else(|| Failure::Usage(format!("--{name} needs a value")))?
            }
        };
        taken.push(FlagText::of(name, text));
    }
    Ok((rest, taken))
}

fn is_gone(option: &str) -> bool {
    key_of(option).is_some() && !KEPT.contains(&option)
}

/// Whether an option has no value.
fn is_switch(option: &str) -> bool {
    key_of(option)
        .is_some_and(|key| schema::default_of(key).is_some_and(|value| value.is_boolean()))
}

/// Reads an options file: keys, values as text, and lines.
pub(super) fn read_file(
    path: &Path,
    text: &str,
) -> (Vec<(&'static str, String, Source)>, Vec<Mistake>) {
    let (mut found, mut mistakes) = (Vec::new(), Vec::new());
    for (line, number) in text.lines().map(str::trim).zip(1..) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => (name.trim(), Some(value.trim().to_owned())),
            None => (line, is_switch(line).then(|| "true".to_owned())),
        };
        let source = Source::File(path.to_owned(), number);
        match (key_of(name), value) {
            (Some(key), Some(value)) => found.push((key, value, source)),
            (Some(_), None) => mistakes.push(Mistake::new(
                source,
                format!("{name} has no value: write `{name} = VALUE`"),
            )),
            (None, _) => mistakes.push(Mistake::new(
                source,
                format!("{line:?} is not an option of an earlier release: write a configuration file, cube.toml"),
            )),
        }
    }
    (found, mistakes)
}
