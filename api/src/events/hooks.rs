//! Webhooks: settings and progress, one file each in `events/webhooks` of the state directory. Mode 0600, because each
//! contains its signature secret.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use envd::Timestamp;
use pool::{
    UnixMs,
    durable::{Durability, private_dir, read_bounded, replace},
};
use rest::{NewWebhook, Webhook as OnWire, WebhookUpdate};
use serde::{Deserialize, Serialize};

use super::Kind;
use crate::{auth::random_hex, uuid::uuid, webhook::Webhook};

const FORMAT: u32 = 1;
const MAX_HOOKS: usize = 32;
const MAX_NAME: usize = 128;
const MAX_SECRET: usize = 512;
const MAX_FILE: u64 = 64 << 10;

/// Why a webhook could not be created or changed.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    #[error("no webhook has the id {0:?}")]
    NotFound(String),
    #[error("{0}")]
    Invalid(String),
    #[error("there are {MAX_HOOKS} webhooks already: delete one")]
    TooMany,
    #[error("cannot write the webhook")]
    Io(#[from] io::Error),
}

#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Hook {
    format: u32,
    pub(super) id: String,
    pub(super) name: String,
    pub(super) url: String,
    pub(super) enabled: bool,
    pub(super) kinds: Vec<Kind>,
    pub(super) secret: String,
    pub(super) created_at: UnixMs,
    /// Number of the last log entry that is done: delivered, given up, or not relevant to this webhook.
    pub(super) done: u64,
}

impl fmt::Debug for Hook {
    /// Omits the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hook")
            .field("id", &self.id)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

impl Hook {
    pub(super) fn on_wire(&self, team: &str) -> OnWire {
        OnWire {
            id: self.id.clone(),
            team_id: team.to_owned(),
            name: self.name.clone(),
            url: self.url.clone(),
            enabled: self.enabled,
            events: self.kinds.iter().map(|k| k.name().to_owned()).collect(),
            created_at: Timestamp::from_unix_ms(self.created_at),
        }
    }

    pub(super) fn wants(&self, kind: &str) -> bool {
        self.kinds.iter().any(|wanted| wanted.name() == kind)
    }
}

#[derive(Debug)]
pub(super) struct Hooks {
    dir: PathBuf,
    all: BTreeMap<String, Hook>,
}

impl Hooks {
    /// Reads all webhooks. Unreadable ones are left alone and not used. `latest` is the number of the latest log entry.
    /// It is lower than a webhook's if the log was lost.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read or created.
    pub(super) fn open(dir: PathBuf, latest: u64) -> io::Result<Self> {
        private_dir(&dir)?;
        let mut all = BTreeMap::new();
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            if path.extension().is_none_or(|e| e != "json") {
                continue;
            }
            match read(&path) {
                Ok(mut hook) => {
                    hook.done = hook.done.min(latest);
                    all.insert(hook.id.clone(), hook);
                }
                Err(error) => {
                    tracing::error!(path = %path.display(), %error, "cannot read a webhook: it will receive no events");
                }
            }
        }
        Ok(Self { dir, all })
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Hook> {
        self.all.values()
    }

    /// # Errors
    /// Returns [`HookError::NotFound`].
    pub(super) fn get(&self, id: &str) -> Result<&Hook, HookError> {
        let missing = || HookError::NotFound(id.chars().take(64).collect());
        self.all.get(id).ok_or_else(missing)
    }

    /// Adds a webhook that gets the entries after `done`.
    ///
    /// # Errors
    /// Returns [`HookError`].
    pub(super) fn create(
        &mut self,
        body: NewWebhook,
        now: UnixMs,
        done: u64,
    ) -> Result<Hook, HookError> {
        if self.all.len() >= MAX_HOOKS {
            return Err(HookError::TooMany);
        }
        let id = random_hex::<16>().map_err(io::Error::from)?;
        let hook = Hook {
            format: FORMAT,
            id: uuid(&id),
            name: body.name,
            url: body.url,
            enabled: body.enabled.unwrap_or(true),
            kinds: kinds(&body.events)?,
            secret: body.signature_secret,
            created_at: now,
            done,
        };
        check(&hook)?;
        self.write(&hook)?;
        self.all.insert(hook.id.clone(), hook.clone());
        Ok(hook)
    }

    /// Changes a webhook. If it is enabled again, it gets the entries after `latest`.
    ///
    /// # Errors
    /// Returns [`HookError`].
    pub(super) fn update(
        &mut self,
        id: &str,
        body: WebhookUpdate,
        latest: u64,
    ) -> Result<Hook, HookError> {
        let mut hook = self.get(id)?.clone();
        let was_enabled = hook.enabled;
        hook.name = body.name.unwrap_or(hook.name);
        hook.url = body.url.unwrap_or(hook.url);
        hook.enabled = body.enabled.unwrap_or(hook.enabled);
        hook.secret = body.signature_secret.unwrap_or(hook.secret);
        if let Some(events) = &body.events {
            hook.kinds = kinds(events)?;
        }
        if hook.enabled && !was_enabled {
            hook.done = latest;
        }
        check(&hook)?;
        self.write(&hook)?;
        self.all.insert(hook.id.clone(), hook.clone());
        Ok(hook)
    }

    /// # Errors
    /// Returns [`HookError::NotFound`], or [`HookError::Io`] if the file cannot be removed.
    pub(super) fn delete(&mut self, id: &str) -> Result<(), HookError> {
        let file = self.dir.join(file_name(&self.get(id)?.id));
        fs::remove_file(file)?;
        self.all.remove(id);
        Ok(())
    }

    /// Records that everything up to this entry is done. If it cannot be written, some events are delivered again.
    pub(super) fn done(&mut self, id: &str, number: u64) {
        let Some(hook) = self.all.get_mut(id) else {
            return;
        };
        hook.done = hook.done.max(number);
        let hook = hook.clone();
        if let Err(error) = self.write(&hook) {
            tracing::error!(webhook = id, %error, "cannot record the deliveries of a webhook: they will be repeated after a restart");
        }
    }

    fn write(&self, hook: &Hook) -> io::Result<()> {
        let bytes = serde_json::to_vec(hook)?;
        replace(&self.dir, &file_name(&hook.id), &bytes, Durability::Process)
    }
}

fn file_name(id: &str) -> String {
    format!("{id}.json")
}

fn read(path: &Path) -> io::Result<Hook> {
    let bytes = read_bounded(path, MAX_FILE)?;
    let format: Format = serde_json::from_slice(&bytes)?;
    if format.format != FORMAT {
        let format = format.format;
        return Err(io::Error::other(format!("the file has format {format}")));
    }
    Ok(serde_json::from_slice(&bytes)?)
}

#[derive(Deserialize)]
struct Format {
    format: u32,
}

fn kinds(names: &[String]) -> Result<Vec<Kind>, HookError> {
    let mut kinds = Vec::new();
    for name in names {
        let shown: String = name.chars().take(64).collect();
        let unknown = || HookError::Invalid(format!("{shown:?} is not a type of events"));
        let kind = Kind::of(name).ok_or_else(unknown)?;
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    if kinds.is_empty() {
        return Err(HookError::Invalid("events is empty".to_owned()));
    }
    Ok(kinds)
}

fn check(hook: &Hook) -> Result<(), HookError> {
    let is_text = |text: &str, most| (1..=most).contains(&text.len());
    if !is_text(&hook.name, MAX_NAME) {
        let why = format!("name has 1 to {MAX_NAME} bytes");
        return Err(HookError::Invalid(why));
    }
    if !is_text(&hook.secret, MAX_SECRET) {
        let why = format!("signatureSecret has 1 to {MAX_SECRET} bytes");
        return Err(HookError::Invalid(why));
    }
    let parsed: Result<Webhook, String> = hook.url.parse();
    parsed.map(drop).map_err(HookError::Invalid)
}
