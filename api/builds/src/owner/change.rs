//! Changes to records, in this order: names in the pool, record on disk, the other nodes, state in memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use model::clock::unix_ms;
use pool::{PoolError, TemplateKind};
use tracing::{error, warn};

use super::{
    BuildsError, Machinery, Requested,
    task::{Owner, WAIT, blocking},
};
use crate::record::{Reason, TemplateRecord};

impl<M: Machinery> Owner<M> {
    /// Changes a record. If this fails, nothing has changed. New names reach the pool before the record is written, and
    /// removed names leave it afterwards. [`Owner::recover`] repairs a crash in between.
    pub(super) async fn change<T>(
        &mut self,
        id: &str,
        change: impl FnOnce(&mut TemplateRecord) -> T,
    ) -> Result<T, BuildsError> {
        let missing = || BuildsError::NoTemplate(id.to_owned());
        let before = self.templates.get(id).ok_or_else(missing)?.clone();
        let mut after = TemplateRecord::clone(&before);
        let result = change(&mut after);
        if after != *before {
            self.replace(&before, after).await?;
        }
        Ok(result)
    }

    async fn replace(
        &mut self,
        before: &TemplateRecord,
        after: TemplateRecord,
    ) -> Result<(), BuildsError> {
        let (old, new) = (before.pool_names(), after.pool_names());
        if let Err(why) = self.give_names(&old, &new).await {
            self.restore_names(&new, &old).await;
            return Err(why.into());
        }
        let (store, record) = (self.store.clone(), after.clone());
        if let Err(why) = blocking(move || store.write(&record)).await {
            self.restore_names(&new, &old).await;
            return Err(why);
        }
        self.machinery.announce(before, Some(&after)).await;
        let lost = old.keys().filter(|name| !new.contains_key(*name));
        self.take_names(lost).await;
        self.unneeded.extend(before.pool_ids());
        self.templates.insert(before.id.clone(), Arc::new(after));
        // Before the caller gets its response, and before the pool loses templates that clients still see.
        self.show();
        self.remove_unneeded().await;
        Ok(())
    }

    /// Ends a build with a reason. If that cannot be written, the next server ends the build.
    pub(super) async fn fail(&mut self, build: &Requested, reason: Reason) {
        let (id, number, now) = (&build.template_id, &build.build_id, unix_ms());
        let finish = |t: &mut TemplateRecord| t.finish(number, Err(reason.clone()), now);
        let written = self.change(id, finish).await;
        match written {
            Ok(()) | Err(BuildsError::NoTemplate(_)) => {}
            Err(why) => {
                error!(build = number, why = %model::chain(&why), "cannot record the end of a build");
                if let Some(template) = self.templates.get_mut(id) {
                    Arc::make_mut(template).finish(number, Err(reason), now);
                }
            }
        }
    }

    async fn give_names(
        &self,
        old: &BTreeMap<String, String>,
        new: &BTreeMap<String, String>,
    ) -> Result<(), PoolError> {
        let mut moved: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for (name, pool_id) in new {
            if old.get(name) != Some(pool_id) {
                moved.entry(pool_id).or_default().push(name.clone());
            }
        }
        for (pool_id, names) in moved {
            self.machinery.name(pool_id, names).await?;
        }
        Ok(())
    }

    /// Undoes [`Owner::give_names`].
    async fn restore_names(&self, new: &BTreeMap<String, String>, old: &BTreeMap<String, String>) {
        if let Err(why) = self.give_names(new, old).await {
            error!(why = %model::chain(&why), "cannot restore the names of templates");
        }
        let added = new.keys().filter(|name| !old.contains_key(*name));
        self.take_names(added).await;
    }

    pub(super) async fn take_names(&self, names: impl Iterator<Item = &String>) {
        for name in names {
            match self.machinery.unname(name).await {
                Ok(()) | Err(PoolError::NoTemplate(_)) => {}
                Err(why) => {
                    warn!(name, why = %model::chain(&why), "cannot remove a name from a template");
                }
            }
        }
    }

    /// Removes templates in the pool that no build needs. Templates still used by a sandbox or a snapshot are kept for
    /// a later attempt.
    pub(super) async fn remove_unneeded(&mut self) {
        let needed: BTreeSet<_> = self.templates.values().flat_map(|t| t.pool_ids()).collect();
        self.unneeded.retain(|id| !needed.contains(id));
        if self.keeps_all {
            return;
        }
        for id in std::mem::take(&mut self.unneeded) {
            match self.machinery.remove(&id).await {
                Ok(()) | Err(PoolError::NoTemplate(_)) => {}
                Err(_in_use) => drop(self.unneeded.insert(id)),
            }
        }
    }

    /// Ends what the previous server left unfinished, and brings the pool in line with the records.
    pub(super) async fn recover(&mut self) {
        let ids: Vec<_> = self.templates.keys().cloned().collect();
        for id in &ids {
            if let Err(why) = self.change(id, |t| t.recover(unix_ms())).await {
                error!(template = id, why = %model::chain(&why), "cannot record the end of builds");
                if let Some(template) = self.templates.get_mut(id) {
                    Arc::make_mut(template).recover(unix_ms());
                }
            }
        }
        for template in self.templates.values() {
            self.machinery.announce(template, Some(template)).await;
        }
        let wanted: BTreeMap<_, _> = self
            .templates
            .values()
            .flat_map(|t| t.pool_names())
            .collect();
        let mut present = BTreeMap::new();
        for template in self.machinery.templates().await {
            if template.kind == TemplateKind::Built {
                let names = template.names.into_iter();
                let plain =
                    names.map(|n| n.strip_suffix(":default").map_or(n.clone(), str::to_owned));
                present.extend(plain.map(|name| (name, template.id.clone())));
                self.unneeded.insert(template.id);
            }
        }
        if let Err(why) = self.give_names(&present, &wanted).await {
            error!(why = %model::chain(&why), "cannot restore the names of templates");
        }
        if !self.keeps_all {
            let foreign = present.keys().filter(|name| !wanted.contains_key(*name));
            self.take_names(foreign).await;
        }
        self.remove_unneeded().await;
        self.show();
    }

    pub(super) async fn tick(&mut self) {
        let now = unix_ms();
        let wait_ms = u64::try_from(WAIT.as_millis()).unwrap_or(u64::MAX);
        let since = now.saturating_sub(wait_ms);
        let overdue = self.templates.values().filter(|t| t.is_overdue(since));
        let ids: Vec<_> = overdue.map(|t| t.id.clone()).collect();
        for id in ids {
            // The next tick retries after a failure.
            let _later = self.change(&id, |t| t.expire(since, now)).await;
        }
        self.remove_unneeded().await;
    }
}
