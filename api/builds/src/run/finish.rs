//! The end of a build: boots the last disk, runs the start command, and turns the VM into a template.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use pool::{TemplateDefaults, Work};
use rest::LogLevel;
use tracing::{debug, warn};

use super::{Build, Built, CANCELLED, Failure, Order, Reached, failed, room};
use crate::{
    command::Command,
    guest::{CommandError, Request, Started},
    key::Key,
    layers::{Finished, StartUp},
    machine::Machine,
    output::{Captured, Lines},
    plan::At,
    run::origin::Origin,
    settings::Settings,
};

pub(super) const TITLE: &str = "Finalizing template build";
/// Time limit for the ready command to succeed, as E2B has it.
const READY: Duration = Duration::from_secs(600);
/// Pauses between attempts: the first and the longest.
const READY_STEP: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Time limit of the warm-up program. An image may have another program at that path.
const WARM_UP: Duration = Duration::from_secs(10);
/// Maximum length of the ready command's output in the message about its end, in bytes.
const SHOWN: usize = 500;
/// E2B's ready command for a start command without one.
const DEFAULT_READY: &str = "sleep 20";
const SHARED: &str = "Sandboxes of this template share the state of the start command's processes: random state, tokens and \
    open connections";
/// The root image of an OCI image has mode 777 for everything there (`oci_image::provision`), so only files made by
/// steps are changed. In other root images, changing all modes would copy all files into the layer.
const OPEN_USR_LOCAL: &str = r#"case "$(stat -c %a /usr/local)" in
    777) find /usr/local ! -type l ! -perm -0777 -exec chmod 777 {} + ;;
esac"#;
/// Runs a program with its arguments.
const PROGRAM: &str = r#"exec "$@""#;

/// The keys of a finished template.
#[derive(Clone, Copy)]
struct Keys {
    /// For builds of the same client template.
    own: Key,
    /// For builds of any client template.
    shared: Key,
}

impl Build<'_> {
    /// The commands of the order, or else of the template that the build starts from.
    pub(super) fn start_up(&self, origin: &Origin) -> StartUp {
        let (start, ready) = (self.order.start.clone(), self.order.ready.clone());
        let start = start.or_else(|| origin.image.as_ref()?.start.clone());
        match (&start, &ready) {
            (None, None) => origin.start_up.clone(),
            _ => StartUp::Author { start, ready },
        }
    }

    /// The keys of the finished template: one for builds of this client template, one for all builds.
    async fn final_keys(&self, steps: Key, start_up: &StartUp) -> Keys {
        let stats = self.executor.pool.stats().await;
        let mut vmms = stats.vmms.into_iter();
        let vmm = vmms.find(|(_, vmm)| vmm.is_present);
        let vmm = vmm.map(|(id, _)| id.to_string()).unwrap_or_default();
        let start_up = serde_json::to_string(start_up).unwrap_or_default();
        let Order {
            memory,
            min_free_disk,
            ..
        } = self.order;
        // Without the warm-up, the key equals that of older releases.
        let free = Some(min_free_disk.0).filter(|free| *free > 0);
        let memory = free.map_or(memory.0.to_string(), |free| format!("{} {free}", memory.0));
        let (steps, id) = (steps.to_string(), &self.order.template_id);
        let key = |id: &str| Key::of(&["template", &steps, id, &start_up, &memory, &vmm]);
        Keys {
            own: key(id),
            shared: key(""),
        }
    }

    /// The finished template of an earlier build with the same steps and commands. Sandboxes, counters and warm slots
    /// belong to one client template, so a build of another template gets a copy, which shares the files.
    pub(super) async fn find_built(&self, reached: &Reached, start_up: &StartUp) -> Option<Built> {
        let (layers, pool) = (&self.executor.layers, &self.executor.pool);
        let keys = self.final_keys(reached.result, start_up).await;
        let built = if let Some(held) = layers.find_built(keys.own).await {
            Built {
                template: held.id().to_owned(),
                held: Some(held),
            }
        } else if let Some(held) = layers.find_built(keys.shared).await {
            let copied = pool.copy_of(held.id()).await.inspect_err(|why| {
                let why = model::chain(why);
                warn!(
                    template = held.id(),
                    why, "cannot copy a finished template: building it instead"
                );
            });
            let (settings, start_up) = (reached.settings.clone(), start_up.clone());
            // Other builds continue to find the template that was copied.
            let found_by = [keys.own];
            self.keep(&copied.ok()?.id, settings, start_up, (keys, &found_by))
                .await
        } else {
            return None;
        };
        let line = super::cached_line("finalize", TITLE, keys.shared);
        self.note(At::Finalize, &line);
        Some(built)
    }

    /// Records a new template with its keys and those under which it is found.
    async fn keep(
        &self,
        template: &str,
        settings: Settings,
        start_up: StartUp,
        (keys, found_by): (Keys, &[Key]),
    ) -> Built {
        let finished = Finished {
            template: template.to_owned(),
            settings,
            start_up,
            keys: vec![keys.own, keys.shared],
        };
        self.executor.layers.keep_built(found_by, finished).await;
        Built {
            template: template.to_owned(),
            held: None,
        }
    }

    pub(super) async fn finish(
        &self,
        reached: &Reached,
        start_up: StartUp,
    ) -> Result<Built, Failure> {
        let at = At::Finalize;
        let keys = self.final_keys(reached.result, &start_up).await;
        self.note(at, &super::line("finalize", TITLE, keys.shared));
        let machine = self.machine(reached, at).await?;
        let published = self.publish(&machine, reached, &start_up).await;
        machine.end().await;
        let template = published.map_err(failed(at))?;
        self.record_working_set(&template, &reached.settings).await;
        let settings = reached.settings.clone();
        let found_by = [keys.own, keys.shared];
        let keys = (keys, found_by.as_slice());
        Ok(self.keep(&template, settings, start_up, keys).await)
    }

    async fn publish(
        &self,
        machine: &Machine,
        reached: &Reached,
        start_up: &StartUp,
    ) -> Result<String, String> {
        let settings = &reached.settings;
        self.open_usr_local(machine).await?;
        let mut started = self.start(machine, settings, start_up).await?;
        self.wait_until_ready(machine, settings, start_up, &mut started)
            .await?;
        room::check(machine, self.order.min_free_disk).await?;
        warm_up(machine).await?;
        self.note(At::Finalize, "Template is ready");
        if self.cancel.is_cancelled() {
            return Err(CANCELLED.to_owned());
        }
        let defaults = TemplateDefaults {
            user: Some(settings.user.clone()),
            workdir: settings.workdir.clone(),
            env: if settings.is_env_exported {
                settings.env.clone()
            } else {
                BTreeMap::new()
            },
        };
        let pool = &self.executor.pool;
        let mut publish = std::pin::pin!(pool.publish(&machine.id, Vec::new(), defaults));
        let published = tokio::select! {
            biased;
            why = failed_unseen(&mut started, start_up) => {
                if let Ok(template) = publish.await {
                    // If this fails, the next server removes it.
                    let _later = pool.remove_template(&template.id).await;
                }
                return Err(why);
            }
            published = &mut publish => published,
        };
        let published = published.map_err(|why| {
            format!(
                "cannot take the snapshot of the template: {}",
                model::chain(&why)
            )
        });
        Ok(published?.id)
    }

    /// Lets all users write files that root's steps have put into /usr/local of an image, as in E2B's templates.
    async fn open_usr_local(&self, machine: &Machine) -> Result<(), String> {
        let command = Command::of_root(OPEN_USR_LOCAL, &[], &Settings::default());
        let why = match machine.guest.capture(&command).await {
            Ok((_, Ok(()))) => return Ok(()),
            Err(CommandError::Cancelled) => return Err(CANCELLED.to_owned()),
            Ok((_, Err(why))) | Err(why) => why,
        };
        let text = format!("cannot make all of /usr/local writable for all users: {why}");
        self.log.push(LogLevel::Warn, At::Finalize, &text);
        Ok(())
    }

    /// Lets a clone do its first work and records the pages that it writes. The template is complete without this, but
    /// its sandboxes are slower at first. A build therefore does not wait for room for the clone, and does not fail
    /// without it.
    async fn record_working_set(&self, template: &str, settings: &Settings) {
        let (pool, policy) = (&self.executor.pool, &self.executor.policy);
        let recorded = match Machine::start_at_once(pool, template, policy, &self.cancel).await {
            Ok(clone) => {
                let recorded = self.record_of(&clone, settings).await;
                clone.end().await;
                recorded
            }
            Err(why) => Err(why.to_string()),
        };
        if let Err(why) = recorded {
            warn!(
                template,
                why,
                "cannot record the working set of a built template: its sandboxes start slower at first"
            );
        }
    }

    async fn record_of(&self, clone: &Machine, settings: &Settings) -> Result<(), String> {
        let work = Command::of_author("true", settings);
        let worked = clone.guest.capture(&work).await;
        let (_, ended) = worked.map_err(|why| why.to_string())?;
        ended.map_err(|why| why.to_string())?;
        let recorded = self.executor.pool.record_working_set(&clone.id).await;
        recorded.map_err(|why| model::chain(&why))
    }

    /// Starts the start command, if there is one.
    async fn start(
        &self,
        machine: &Machine,
        settings: &Settings,
        start_up: &StartUp,
    ) -> Result<Option<Started>, String> {
        let command = match start_up {
            StartUp::Nothing | StartUp::Author { start: None, .. } => return Ok(None),
            StartUp::Author {
                start: Some(script),
                ..
            } => Command::of_author(script, settings),
            StartUp::Recipe { start, .. } => {
                let args: Vec<_> = start.iter().map(String::as_str).collect();
                Command::of_root(PROGRAM, &args, &Settings::default())
            }
        };
        let command = Command {
            limit: None,
            ..command
        };
        self.note(At::Finalize, "Running start command");
        self.log.push(LogLevel::Warn, At::Finalize, SHARED);
        let lines = Lines::new(self.log, LogLevel::Info, At::Finalize, "start");
        let started = machine.guest.start(&command, lines).await;
        started.map(Some).map_err(start_failed)
    }

    /// Repeats the ready command until it succeeds. Stops waiting if the start command exits with an error.
    async fn wait_until_ready(
        &self,
        machine: &Machine,
        settings: &Settings,
        start_up: &StartUp,
        started: &mut Option<Started>,
    ) -> Result<(), String> {
        let ready = match start_up {
            StartUp::Nothing
            | StartUp::Author {
                start: None,
                ready: None,
            } => return Ok(()),
            StartUp::Author { ready, .. } => {
                Ready::Script(ready.as_deref().unwrap_or(DEFAULT_READY))
            }
            StartUp::Recipe { ready: None, .. } => return Ok(()),
            StartUp::Recipe {
                ready: Some(work), ..
            } => Ready::Work(work),
        };
        let text = format!("Waiting for template to be ready: {ready}");
        self.note(At::Finalize, &text);
        let is_default = matches!(start_up, StartUp::Author { ready: None, .. });
        let ended = async {
            match started {
                Some(started) => match started.wait().await {
                    Ok(()) if is_default => Ok(()),
                    // A program may have put itself into the background.
                    Ok(()) => std::future::pending().await,
                    Err(error) => Err(start_failed(error)),
                },
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            ended = ended => ended,
            ready = poll_in_time(machine, settings, &ready) => ready,
        }
    }
}

/// Runs the program that the pool's slots run before they wait, so that they find it in the page cache. If this fails
/// (an image may lack the program), the slots are slower. Does not use a login shell, whose profile may leave files and
/// processes.
async fn warm_up(machine: &Machine) -> Result<(), String> {
    let command = Command {
        limit: Some(WARM_UP),
        ..Command::of_root(PROGRAM, &[template::SLOT_WARM_UP], &Settings::default())
    };
    for _ in 0..template::WARM_UP_RUNS {
        let why = match machine.guest.capture(&command).await {
            Ok((_, Ok(()))) => continue,
            Err(CommandError::Cancelled) => return Err(CANCELLED.to_owned()),
            Ok((_, Err(why))) | Err(why) => why,
        };
        debug!(%why, "the warm-up of a template failed");
        break;
    }
    Ok(())
}

/// Waits for an error of a start command that has no ready command, until its guest is quiet.
async fn failed_unseen(started: &mut Option<Started>, start_up: &StartUp) -> String {
    if let (Some(started), StartUp::Recipe { ready: None, .. }) = (started, start_up)
        && let Err(error @ CommandError::Status(_)) = started.wait().await
    {
        return start_failed(error);
    }
    std::future::pending().await
}

/// Checks whether a guest is ready.
enum Ready<'a> {
    Script(&'a str),
    Work(&'a Work),
}

impl std::fmt::Display for Ready<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Script(script) => f.write_str(script),
            Self::Work(Work::Run { argv, .. }) => f.write_str(&argv.join(" ")),
            Self::Work(Work::Request { port, path, .. }) => write!(f, "port {port}, {path}"),
        }
    }
}

async fn poll_in_time(
    machine: &Machine,
    settings: &Settings,
    ready: &Ready<'_>,
) -> Result<(), String> {
    let mut last = Captured::default();
    let polled = tokio::time::timeout(READY, poll(machine, settings, ready, &mut last)).await;
    polled.unwrap_or_else(|_| Err(timed_out(&last)))
}

/// E2B's text, and the end of the ready command's last output.
fn timed_out(last: &Captured) -> String {
    let printed = [&last.stdout, &last.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    let printed = printed.join(" ");
    let printed = printed.trim();
    let start = printed.len().saturating_sub(SHOWN);
    let text = "ready command timed out after 10m0s";
    match &printed[printed.ceil_char_boundary(start)..] {
        "" => text.to_owned(),
        shown => format!("{text}; its last output ends with: {shown}"),
    }
}

/// `last` is set to the output of the last completed attempt.
async fn poll(
    machine: &Machine,
    settings: &Settings,
    ready: &Ready<'_>,
    last: &mut Captured,
) -> Result<(), String> {
    let (mut pause, longest) = READY_STEP;
    let started = Instant::now();
    loop {
        let tried = attempt(machine, settings, ready, started, last).await;
        match tried {
            Ok(()) => return Ok(()),
            Err(CommandError::Status(_) | CommandError::Output(_) | CommandError::Limit(_)) => {}
            Err(CommandError::Cancelled) => return Err(CANCELLED.to_owned()),
            Err(error) => return Err(format!("ready command failed: {error}")),
        }
        let slept = machine.guest.sleep(pause).await;
        slept.map_err(|_| CANCELLED.to_owned())?;
        pause = longest.min(pause * 2);
    }
}

async fn attempt(
    machine: &Machine,
    settings: &Settings,
    ready: &Ready<'_>,
    started: Instant,
    last: &mut Captured,
) -> Result<(), CommandError> {
    let command = match ready {
        Ready::Script(script) => Command::of_author(script, settings),
        Ready::Work(Work::Run { argv, .. }) => {
            let args: Vec<_> = argv.iter().map(String::as_str).collect();
            Command::of_root(PROGRAM, &args, &Settings::default())
        }
        Ready::Work(Work::Request {
            port,
            path,
            body,
            expects,
        }) => {
            let request = Request {
                port: *port,
                path: path.clone(),
                body: body.clone(),
                expects: expects.clone(),
            };
            return machine.guest.request(request).await;
        }
    };
    let command = Command {
        limit: Some(READY.saturating_sub(started.elapsed())),
        ..command
    };
    let (output, ended) = machine.guest.capture(&command).await?;
    *last = output;
    ended
}

fn start_failed(error: CommandError) -> String {
    match error {
        CommandError::Cancelled => CANCELLED.to_owned(),
        error => format!("start command failed: error running start command: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_last_output_explains_why_a_guest_was_not_ready() {
        let text = "ready command timed out after 10m0s";
        assert_eq!(timed_out(&Captured::default()), text);
        let last = Captured {
            stdout: format!("first{}", "ü".repeat(SHOWN)).into_bytes(),
            stderr: b"connection refused\n".to_vec(),
        };
        let told = timed_out(&last);
        assert!(told.starts_with(text) && told.ends_with("ü connection refused"));
        assert!(told.len() < text.len() + SHOWN + 40 && !told.contains("first"));
    }
}
