//! The list of templates: adding, naming and removing them. [`super::making`] makes templates.

use std::path::{Path, PathBuf};

use library::{
    NewTemplate,
    error::LibraryError,
    info::{TemplateInfo, TemplateKind},
    manifest::Manifest,
    template::{Origin, Template},
};

use super::{Driver, entry::Entry};
use crate::{
    answer::Answer,
    change::ChangeKind,
    error::PoolError,
    host,
    message::{Published, Renamed},
    slot::Stage,
    state_dir::TEMPLATES,
};

impl Driver {
    pub(super) fn template_info(&self, template: &Template) -> TemplateInfo {
        let info = template.info.clone();
        let warm = self.admission.stock.len(&info.id);
        TemplateInfo { warm, ..info }
    }

    pub(super) fn all_templates(&self) -> Vec<TemplateInfo> {
        let mut all: Vec<_> = self.library.iter().collect();
        all.sort_by(|a, b| (&a.info.names, &a.info.id).cmp(&(&b.info.names, &b.info.id)));
        all.into_iter().map(|t| self.template_info(t)).collect()
    }

    pub(super) fn add_template(
        &mut self,
        dir: &Path,
        names: Vec<String>,
        answer: Answer<TemplateInfo>,
    ) {
        let drafted = self.draft_template(dir, &names);
        let Some(((id, dir), answer)) = answer.or_refuse(drafted) else {
            return;
        };
        let created = host::unix_ns() / 1_000_000_000;
        let origin = Origin::Elsewhere(dir);
        let kept = self.library.keep(&id, names, origin, created);
        self.publish(&id, kept.map_err(PoolError::from), answer);
    }

    /// Generates a random id for a template whose files are in `dir`. Returns it with the canonical directory.
    fn draft_template(&self, dir: &Path, names: &[String]) -> Result<(String, PathBuf), PoolError> {
        let failed = |e: std::io::Error| PoolError::Failed {
            what: "add a template",
            why: format!("{}: {e}", dir.display()),
        };
        self.library.check_names(names)?;
        let dir = dir.canonicalize().map_err(failed)?;
        let (id, _) = self
            .library
            .draft()
            .map_err(|e| PoolError::of_disk("add a template", &e))?;
        Ok((id, dir))
    }

    /// Writes a new template to disk, then responds. On error, removes the template's directory.
    pub(super) fn publish(
        &mut self,
        id: &str,
        kept: Result<NewTemplate, PoolError>,
        answer: Answer<TemplateInfo>,
    ) {
        match kept {
            Ok(new) => {
                self.upkeep.job_begins();
                self.jobs.publish(new.records, new.info, new.taken, answer);
            }
            Err(e) => {
                let home = self.config.state.join(TEMPLATES).join(id);
                self.jobs.change_templates(move || {
                    let _ = std::fs::remove_dir_all(home);
                    answer.send(Err(e));
                });
            }
        }
    }

    pub(super) fn published(&mut self, published: Published) {
        self.upkeep.job_ended();
        let Published {
            template,
            taken,
            written,
            answer,
        } = published;
        let result = written.map_err(|e| {
            self.library.unpublish(&template.id, taken);
            PoolError::of_disk("add a template", &e)
        });
        if let (Ok(()), TemplateKind::Snapshot, Some(source)) =
            (&result, template.kind, template.source.clone())
        {
            self.changed(&source, ChangeKind::Snapshotted);
        }
        answer.send(result.map(|()| template));
    }

    pub(super) fn give_names(&mut self, reference: &str, names: &[String], answer: Answer<()>) {
        let renamed = self.library.give_names(reference, names);
        self.rename(renamed, answer);
    }

    pub(super) fn take_names(&mut self, names: &[String], answer: Answer<()>) {
        let renamed = self.library.take_names(names);
        self.rename(renamed, answer);
    }

    /// Writes renamed templates to disk, then responds.
    fn rename(&mut self, renamed: Result<library::Renamed, LibraryError>, answer: Answer<()>) {
        if let Some((renamed, answer)) = answer.or_refuse(renamed) {
            self.upkeep.job_begins();
            self.jobs.rename(renamed.records, renamed.former, answer);
        }
    }

    pub(super) fn renamed(&mut self, renamed: Renamed) {
        self.upkeep.job_ended();
        let Renamed {
            former,
            written,
            answer,
        } = renamed;
        let result = written.map_err(|e| {
            self.library.undo_names(former);
            PoolError::of_disk("name a template", &e)
        });
        answer.send(result);
    }

    pub(super) fn remove_template(&mut self, name: &str, answer: Answer<()>) {
        let removable = match self.library.find(name) {
            None => Err(PoolError::NoTemplate(name.to_owned())),
            Some(template) => match self.user_of(&template.dir) {
                Some(user) => Err(PoolError::InUse(name.to_owned(), user)),
                None => Ok(template.info.id.clone()),
            },
        };
        let Some((id, answer)) = answer.or_refuse(removable) else {
            return;
        };
        self.end_stock(&id);
        let supply = self.admission.stock.forget(&id);
        let record = self.library.forget(&id);
        self.upkeep.look_for_unused_images();
        let storing = self.upkeep.take_storing(&id);
        self.jobs.change_templates(move || {
            // Freeing huge pages takes time.
            drop(supply);
            if let Some(storing) = storing {
                storing.end();
            }
            let removed = record.map_or(Ok(()), |record| record.remove());
            let failed = |e| PoolError::of_disk("remove a template", &e);
            answer.send(removed.map_err(failed));
        });
    }

    /// Describes another template or a sandbox that needs the template's files in `dir`. `None` if there is none.
    fn user_of(&self, dir: &Path) -> Option<String> {
        if let Some(other) = self.library.built_on(dir).first() {
            return Some(format!("template {other} builds on it"));
        }
        self.slots
            .iter()
            .filter(|(_, e)| !matches!(e.slot.stage, Stage::Warm | Stage::Filling))
            .find(|(_, e)| self.base_of_pause(e).as_deref() == Some(dir))
            .map(|(id, _)| format!("sandbox {id} is paused on it"))
    }

    /// The directory of the template that the sandbox's pause is a diff of, if it is a diff.
    fn base_of_pause(&self, entry: &Entry) -> Option<PathBuf> {
        let manifest = Manifest::read(&entry.dir.pause()).ok()?;
        Some(self.library.images().base(&manifest.base?))
    }
}
