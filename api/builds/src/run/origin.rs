//! Origin of a build.

use model::quoted;
use oci_image::config::Defaults;
use pool::{PoolError, Recipe, TemplateInfo, TemplateKind};
use rest::ImageConfig;

use super::{Build, CANCELLED, Failure, failed};
use crate::{
    key::Key,
    layers::{Finished, Layer, StartUp},
    machine::Machine,
    plan::{At, From},
    settings::Settings,
};

pub(super) struct Origin {
    pub(super) key: Key,
    pub(super) settings: Settings,
    /// Also runs in the new template, unless the order has its own commands.
    pub(super) start_up: StartUp,
    /// Whether the account of the sandboxes' user may be missing.
    pub(super) lacks_user: bool,
    /// Settings that the order takes from an image's config.
    pub(super) image: Option<FromConfig>,
    source: Source,
}

/// Settings that a build takes from an image's config.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FromConfig {
    /// In the form of a USER step.
    pub(super) user: String,
    pub(super) workdir: String,
    /// Entrypoint and command as a script. `None`: there is none, or the order has its own.
    pub(super) start: Option<String>,
}

/// Maximum total size of the variables that every sandbox gets, in bytes. Equals the limit for a create.
const MAX_EXPORTED: usize = 256 << 10;

impl FromConfig {
    fn of(config: ImageConfig, defaults: &Defaults) -> Result<Self, String> {
        let env = defaults.env.iter().map(|(n, v)| n.len() + v.len());
        if env.sum::<usize>() > MAX_EXPORTED {
            return Err(format!(
                "the image's variables have more than {MAX_EXPORTED} bytes, too many to give them to sandboxes"
            ));
        }
        let command: Vec<_> = (defaults.entrypoint.iter().chain(&defaults.cmd))
            .map(|word| quoted(word))
            .collect();
        let runs = config == ImageConfig::Start && !command.is_empty();
        Ok(Self {
            user: defaults.user.clone().unwrap_or_else(|| "root".to_owned()),
            workdir: defaults.workdir.clone().unwrap_or_else(|| "/".to_owned()),
            start: runs.then(|| format!("exec {}", command.join(" "))),
        })
    }
}

/// Source of the first disk.
enum Source {
    /// A disk template that is kept elsewhere.
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
            // A disk cannot shrink, so a build that requests less space does not continue from it.
            origin.key = Key::of(&["room", &origin.key.to_string(), &free.to_string()]);
        }
        Ok(origin)
    }

    async fn of_image(&self, reference: &str) -> Result<Origin, String> {
        let (bases, credentials) = (&self.executor.bases, self.order.registry.clone());
        let base = bases.of_image(reference, credentials, self.log, &self.cancel);
        let base = base.await?;
        let config = self.order.image_config;
        let image = config.map(|config| FromConfig::of(config, &base.defaults));
        let image = image.transpose()?;
        Ok(Origin {
            // Disks of the same image differ in the settings stored with them.
            key: match &image {
                None => Key::of(&["image", &base.key]),
                Some(_) => Key::of(&["image", &base.key, "config"]),
            },
            settings: Settings {
                env: base.defaults.env.into_iter().collect(),
                is_env_exported: image.is_some(),
                ..Settings::default()
            },
            start_up: StartUp::Nothing,
            lacks_user: true,
            image,
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
            image: None,
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

    /// The disk that the first step starts from.
    pub(super) async fn disk_of(&self, origin: &Origin) -> Result<Layer, String> {
        let layers = &self.executor.layers;
        match &origin.source {
            Source::Disk(id) => Ok(Layer::of_others(id.clone())),
            Source::Template(id) => {
                let disk = self.executor.pool.disk_of(id).await;
                match disk {
                    Ok(disk) => Ok(layers.hold(disk.id)),
                    // A diff snapshot of an installed template.
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

/// The recorded results of a template's build. Without them, a built template would silently lose its variables and its
/// start command. Installed templates and snapshots never have them.
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

/// An installed template keeps its id when it is rebuilt.
fn key_of(template: &TemplateInfo) -> Key {
    let made = template.created_unix_s.to_string();
    Key::of(&["template", &template.id, &made])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::tests::info;

    #[test]
    fn the_config_of_an_image_becomes_a_user_a_directory_and_a_script() {
        let text = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        let defaults = Defaults {
            entrypoint: text(&["/entry point"]),
            cmd: text(&["it's", "$HOME"]),
            user: Some("1000:1000".to_owned()),
            ..Defaults::default()
        };
        let start = FromConfig::of(ImageConfig::Start, &defaults).unwrap();
        let script = r"exec '/entry point' 'it'\''s' '$HOME'";
        assert_eq!(start.start.as_deref(), Some(script));
        assert_eq!(
            (start.user.as_str(), start.workdir.as_str()),
            ("1000:1000", "/")
        );
        let only = FromConfig::of(ImageConfig::Defaults, &defaults).unwrap();
        assert_eq!(only.start, None);
        let none = FromConfig::of(ImageConfig::Start, &Defaults::default()).unwrap();
        assert_eq!((none.user.as_str(), none.start), ("root", None));
        let large = Defaults {
            env: vec![("A".to_owned(), "x".repeat(MAX_EXPORTED))],
            ..Defaults::default()
        };
        assert!(FromConfig::of(ImageConfig::Defaults, &large).is_err());
    }

    #[test]
    fn a_built_template_whose_settings_are_lost_is_no_origin() {
        let built = info("id", TemplateKind::Built, &["x:v1"]);
        let why = recorded(&built, "id", None).unwrap_err();
        assert!(why.contains("'x:v1'") && why.contains("build that template again"));
        let why = recorded(&info("id", TemplateKind::Built, &[]), "id", None).unwrap_err();
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
            assert_eq!(recorded(&info("id", kind, &[]), "id", None), Ok(None));
        }
    }
}
