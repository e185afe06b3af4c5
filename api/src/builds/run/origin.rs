//! What a build begins with.

use pool::{PoolError, Recipe, TemplateInfo, TemplateKind};

use super::{Build, CANCELLED, Failure, failed};
use crate::builds::{
    key::Key,
    layers::{Finished, Layer, StartUp},
    machine::Machine,
    plan::{At, From},
    settings::Settings,
};

pub(super) struct Origin {
    pub(super) key: Key,
    pub(super) settings: Settings,
    /// What runs in the new template too, unless the order has commands of its own.
    pub(super) start_up: StartUp,
    /// Whether there may be no account for the user of sandboxes.
    pub(super) lacks_user: bool,
    source: Source,
}

/// Where the first disk comes from.
enum Source {
    /// A disk template that others keep.
    Disk(String),
    /// A template with a complete disk.
    Template(String),
    /// A template whose disk is complete only together with its memory.
    Snapshot(String),
}

impl Build<'_> {
    pub(super) async fn origin(&self) -> Result<Origin, Failure> {
        let origin = match &self.order.from {
            From::Image(reference) => self.of_image(reference).await,
            From::Template(reference) => self.of_template(reference).await,
        };
        self.check_cancel(At::Base)?;
        let mut origin = origin.map_err(failed(At::Base))?;
        let free = self.order.min_free_disk.0;
        if free > 0 {
            // A disk cannot shrink: a build that asks for less does not continue from it.
            origin.key = Key::of(&["room", &origin.key.to_string(), &free.to_string()]);
        }
        Ok(origin)
    }

    async fn of_image(&self, reference: &str) -> Result<Origin, String> {
        let (bases, credentials) = (&self.executor.bases, self.order.registry.clone());
        let base = bases.of_image(reference, credentials, self.log, &self.cancel);
        let base = base.await?;
        Ok(Origin {
            key: Key::of(&["image", &base.key]),
            settings: Settings {
                env: base.defaults.env.into_iter().collect(),
                ..Settings::default()
            },
            start_up: StartUp::Nothing,
            lacks_user: true,
            source: Source::Disk(base.template),
        })
    }

    async fn of_template(&self, reference: &str) -> Result<Origin, String> {
        let found = self.executor.pool.template(reference).await;
        let unknown = || format!("template '{reference}' was not found");
        let template = found
            .filter(|template| template.kind != TemplateKind::Disk)
            .ok_or_else(unknown)?;
        let former = self.executor.layers.finished(&template.id);
        let (settings, start_up) = match recorded(&template, reference, former)? {
            Some(former) => (former.settings, former.start_up),
            None => (Settings::default(), self.start_up_of(&template).await?),
        };
        let id = template.id.clone();
        Ok(Origin {
            key: key_of(&template),
            settings,
            start_up,
            lacks_user: false,
            source: match template.kind {
                TemplateKind::Snapshot => Source::Snapshot(id),
                TemplateKind::Installed | TemplateKind::Built | TemplateKind::Disk => {
                    Source::Template(id)
                }
            },
        })
    }

    async fn start_up_of(&self, template: &TemplateInfo) -> Result<StartUp, String> {
        if template.kind != TemplateKind::Installed {
            return Ok(StartUp::Nothing);
        }
        let recipe = self.executor.pool.recipe(&template.id).await;
        match recipe.map_err(|why| model::chain(&why))? {
            Some(Recipe { start, ready, .. }) if !start.is_empty() => {
                Ok(StartUp::Recipe { start, ready })
            }
            Some(_) | None => Ok(StartUp::Nothing),
        }
    }

    /// The disk from which the first step starts.
    pub(super) async fn disk_of(&self, origin: &Origin) -> Result<Layer, String> {
        let layers = &self.executor.layers;
        match &origin.source {
            Source::Disk(id) => Ok(Layer::of_others(id.clone())),
            Source::Template(id) => {
                let disk = self.executor.pool.disk_of(id).await;
                match disk {
                    Ok(disk) => Ok(layers.hold(disk.id)),
                    // A diff of an installed template.
                    Err(PoolError::NoDisk(_)) => self.disk_of_clone(id).await,
                    Err(why) => Err(model::chain(&why)),
                }
            }
            Source::Snapshot(id) => self.disk_of_clone(id).await,
        }
    }

    /// The disk of a sandbox that continues from a snapshot.
    async fn disk_of_clone(&self, template: &str) -> Result<Layer, String> {
        let (pool, policy) = (&self.executor.pool, &self.executor.policy);
        let machine = Machine::start(pool, template, policy, &self.cancel, |_| {}).await;
        let machine = machine.map_err(|why| why.to_string())?;
        let saved = match machine.end_processes().await {
            Ok(()) => pool
                .save_disk(&machine.id)
                .await
                .map_err(|why| model::chain(&why)),
            Err(why) => Err(why.to_string()),
        };
        machine.end().await;
        let layer = self.executor.layers.hold(saved?.id);
        if self.cancel.is_cancelled() {
            return Err(CANCELLED.to_owned());
        }
        Ok(layer)
    }
}

/// What the build of a template ended with. Without it, a built template would silently lose its variables and its start
/// command; installed templates and snapshots never have it.
fn recorded(
    template: &TemplateInfo,
    reference: &str,
    former: Option<Finished>,
) -> Result<Option<Finished>, String> {
    if former.is_none() && template.kind == TemplateKind::Built {
        let name = template.names.first().map_or(reference, String::as_str);
        return Err(format!(
            "this server has lost the settings and the start command of template '{name}': build that template again, \
             then this one"
        ));
    }
    Ok(former)
}

/// An installed template keeps its id when it is made anew.
fn key_of(template: &TemplateInfo) -> Key {
    let made = template.created_unix_s.to_string();
    Key::of(&["template", &template.id, &made])
}

#[cfg(test)]
mod tests {
    use model::Bytes;

    use super::*;

    fn template(kind: TemplateKind, names: &[&str]) -> TemplateInfo {
        TemplateInfo {
            id: "id".to_owned(),
            names: names.iter().map(ToString::to_string).collect(),
            memory: Bytes::mib(512),
            vcpus: 1,
            disk: Bytes::mib(64),
            created_unix_s: 1,
            kind,
            source: None,
            spawned: 0,
            warm: 0,
            vmm: None,
            bytes: Bytes(0),
        }
    }

    #[test]
    fn a_built_template_whose_settings_are_lost_is_no_origin() {
        let built = template(TemplateKind::Built, &["x:v1"]);
        let why = recorded(&built, "id", None).unwrap_err();
        assert!(why.contains("'x:v1'") && why.contains("build that template again"));
        let why = recorded(&template(TemplateKind::Built, &[]), "id", None).unwrap_err();
        assert!(why.contains("'id'"), "{why}");
        let finished = Finished {
            template: "id".to_owned(),
            settings: Settings::default(),
            start_up: StartUp::Nothing,
            keys: Vec::new(),
        };
        let kept = recorded(&built, "id", Some(finished.clone()));
        assert_eq!(kept, Ok(Some(finished)));
        for kind in [TemplateKind::Snapshot, TemplateKind::Installed] {
            assert_eq!(recorded(&template(kind, &[]), "id", None), Ok(None));
        }
    }
}
