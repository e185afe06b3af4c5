//! Transfer of a finished build to another node of the cluster. Its disk is transferred: root image and layer. The
//! memory is created on the other node, as at the end of a build, so that it fits that node's CPU, kernel and VMM.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use model::Bytes;
use pool::DiskSpec;
use serde::{Deserialize, Serialize};

use super::{Build, Executor, Order, Reached};
use crate::{
    cancel::Cancel, key::Key, layers::StartUp, log::BuildLog, plan::From, settings::Settings,
    uploads::Uploads,
};

/// Maximum size of the variables of a build from another node, and of a user or a directory name, in bytes.
const MAX_ENV: usize = 4 << 20;
const MAX_WORD: usize = 4096;

/// Metadata of a build that is sent along with its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Described {
    settings: Settings,
    start_up: StartUp,
    memory: Bytes,
    vcpus: u8,
}

/// A finished build on this node.
#[derive(Debug)]
pub struct Finished {
    pub root: PathBuf,
    pub layer: PathBuf,
    pub described: Described,
}

/// A build of another node whose files have arrived here.
#[derive(Debug)]
pub struct Arrived<'a> {
    /// The client-visible id of the template.
    pub template_id: &'a str,
    pub root: &'a Path,
    pub layer: &'a Path,
    /// Equal for equal disks.
    pub content: &'a str,
    pub described: Described,
    pub min_free_disk: Bytes,
}

impl Described {
    /// Returns the reason why this cannot come from a correct server, or `None` if it is plausible.
    pub fn check(&self) -> Option<&'static str> {
        let env = self.settings.env.iter();
        let env: usize = env.map(|(name, value)| name.len() + value.len()).sum();
        let workdir = self.settings.workdir.as_deref().unwrap_or("/");
        if env > MAX_ENV {
            return Some("its variables are too long");
        }
        if self.settings.user.is_empty() || self.settings.user.len() > MAX_WORD {
            return Some("its user is malformed");
        }
        (workdir.len() > MAX_WORD || !workdir.starts_with('/'))
            .then_some("its directory is malformed")
    }
}

impl Executor {
    /// The files of a built template, and the results of its build.
    ///
    /// # Errors
    /// Returns a message for people.
    pub async fn finished(&self, template: &str) -> Result<Finished, String> {
        let ended = self.layers.finished(template).ok_or_else(|| {
            "this server has lost the settings of the template: build it again".to_owned()
        })?;
        let files = self.pool.disk_files(template).await;
        let files = files.map_err(|why| model::chain(&why))?;
        let layer = files.layer.ok_or("the template has no layer")?;
        Ok(Finished {
            root: files.root,
            layer,
            described: Described {
                settings: ended.settings,
                start_up: ended.start_up,
                memory: files.memory,
                vcpus: files.vcpus,
            },
        })
    }

    /// The root images of this node's templates, without duplicates.
    pub async fn roots(&self) -> BTreeSet<PathBuf> {
        let mut roots = BTreeSet::new();
        for template in self.pool.templates().await {
            let files = self.pool.disk_files(&template.id).await;
            roots.extend(files.map(|files| files.root));
        }
        roots
    }

    /// Makes an unnamed template from the disk of another node's build, and returns its id in the pool. The files are
    /// linked.
    ///
    /// # Errors
    /// Returns a message for people.
    pub async fn make_of(
        &self,
        arrived: Arrived<'_>,
        files: &Uploads,
        cancel: Cancel,
    ) -> Result<String, String> {
        let Described {
            settings,
            start_up,
            memory,
            vcpus,
        } = arrived.described;
        let disk = self.pool.add_disk(DiskSpec {
            root: arrived.root.to_owned(),
            layer: Some(arrived.layer.to_owned()),
            memory,
            vcpus,
        });
        let disk = disk.await.map_err(|why| model::chain(&why))?;
        let reached = Reached {
            result: Key::of(&["copy", arrived.content]),
            settings,
            layer: Some(self.layers.hold(disk.id)),
            stages: 0,
        };
        let order = Order {
            template_id: arrived.template_id.to_owned(),
            from: From::Template(arrived.template_id.to_owned()),
            registry: None,
            steps: Vec::new(),
            start: None,
            ready: None,
            image_config: None,
            force: false,
            vcpus,
            memory,
            min_free_disk: arrived.min_free_disk,
        };
        let build = Build {
            executor: self,
            order: &order,
            files,
            log: &BuildLog::default(),
            cancel,
        };
        let made = build.finish(&reached, start_up).await;
        made.map(|built| built.template)
            .map_err(|failure| failure.bounded().message)
    }
}
