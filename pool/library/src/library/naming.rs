//! Names that move between templates.

use std::collections::BTreeSet;

use super::Library;
use crate::{
    error::LibraryError,
    names::{TakenNames, plain},
    record::TemplateRecord,
};

/// A change of names that must be written to disk.
#[derive(Debug)]
pub struct Renamed {
    /// The record of the template that gets names, then the records of the templates that lose them. In this order a
    /// crash leaves each name with at least one template, and [`Library::open`] gives it to one.
    pub records: Vec<TemplateRecord>,
    pub former: TakenNames,
}

impl Library {
    /// Adds names to a template. The caller must write the records, and undo the change with [`Library::undo_names`]
    /// if that fails.
    ///
    /// # Errors
    /// Returns [`LibraryError::NoTemplate`], the errors of [`Library::check_names`], and [`LibraryError::BadName`] for an
    /// installed template, whose only name is that of its directory.
    pub fn give_names(
        &mut self,
        reference: &str,
        names: &[String],
    ) -> Result<Renamed, LibraryError> {
        self.check_names(names)?;
        let template = self.find(reference);
        let template = template.ok_or_else(|| LibraryError::NoTemplate(reference.to_owned()))?;
        if template.kept.is_none() {
            return Err(LibraryError::BadName(format!(
                "the template {reference:?} is installed: its only name is the name of its directory"
            )));
        }
        let id = template.info.id.clone();
        let (mut records, mut former) = self.take_names_from_others(&id, names);
        if let Some(template) = self.by_id.get_mut(&id) {
            let own = template.info.names.clone();
            let mut had: BTreeSet<_> = own.iter().map(|n| plain(n).to_owned()).collect();
            let new = names.iter().filter(|n| had.insert(plain(n).to_owned()));
            template.info.names.extend(new.cloned());
            records.splice(0..0, template.record(&self.dir));
            former.insert(0, (id, own));
        }
        Ok(Renamed { records, former })
    }

    /// Removes names from the templates that have them. The caller must write the records, and undo the change with
    /// [`Library::undo_names`] if that fails.
    ///
    /// # Errors
    /// Returns [`LibraryError::NoTemplate`] with the first name that no template has, and [`LibraryError::BadName`] for the
    /// name of an installed template.
    pub fn take_names(&mut self, names: &[String]) -> Result<Renamed, LibraryError> {
        for name in names {
            let mut all = self.iter();
            let has = |owned: &String| plain(owned) == plain(name);
            let owner = all.find(|t| t.info.names.iter().any(has));
            let owner = owner.ok_or_else(|| LibraryError::NoTemplate(name.clone()))?;
            if owner.kept.is_none() {
                return Err(LibraryError::BadName(format!(
                    "{name:?} is the name of an installed template"
                )));
            }
        }
        let (records, former) = self.take_names_from_others("", names);
        Ok(Renamed { records, former })
    }

    /// Undoes a change of names that could not be written. Names that another template has received since then stay
    /// there.
    pub fn undo_names(&mut self, former: TakenNames) {
        for (id, names) in former {
            let free: Vec<_> = names
                .into_iter()
                .filter(|name| self.find(name).is_none_or(|t| t.info.id == id))
                .collect();
            if let Some(template) = self.by_id.get_mut(&id) {
                template.info.names = free;
            }
        }
    }

    /// Undoes an addition that could not be written: removes the template and returns the names.
    pub fn unpublish(&mut self, id: &str, taken: TakenNames) {
        self.by_id.remove(id);
        self.undo_names(taken);
    }

    /// Removes names from every template but this one. Returns the new records of the templates that lose names, and
    /// their previous names.
    pub(crate) fn take_names_from_others(
        &mut self,
        id: &str,
        names: &[String],
    ) -> (Vec<TemplateRecord>, TakenNames) {
        let wanted: BTreeSet<_> = names.iter().map(|n| plain(n)).collect();
        let (mut records, mut taken) = (Vec::new(), Vec::new());
        let others = self.by_id.values_mut().filter(|t| t.info.id != id);
        for template in others.filter(|t| t.kept.is_some()) {
            let former = template.info.names.clone();
            template.info.names.retain(|n| !wanted.contains(plain(n)));
            if template.info.names != former {
                records.extend(template.record(&self.dir));
                taken.push((template.info.id.clone(), former));
            }
        }
        (records, taken)
    }
}
