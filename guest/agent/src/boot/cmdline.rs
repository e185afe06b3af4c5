//! The kernel's command line: options of the agent and parameters of modules.

/// Words of the command line.
pub(super) struct CommandLine<'a> {
    words: Vec<&'a str>,
}

impl<'a> CommandLine<'a> {
    /// Splits at white space outside double quotes, as the kernel does (`next_arg` in lib/cmdline.c).
    /// Words after a lone `--` are arguments of init and are ignored.
    pub(super) fn parse(text: &'a str) -> Self {
        let mut quoted = false;
        let ends = |c: char| {
            quoted ^= c == '"';
            c.is_whitespace() && !quoted
        };
        let words = text.split(ends).filter(|w| !w.is_empty());
        Self {
            words: words.take_while(|w| *w != "--").collect(),
        }
    }

    /// The value of the last `name=value`.
    pub(super) fn value(&self, name: &str) -> Option<&'a str> {
        let mut values = self.words.iter().rev().filter_map(|w| w.split_once('='));
        values.find(|(n, _)| *n == name).map(|(_, value)| value)
    }

    /// The parameters of one module, which the command line gives as `module.name=value`. Returns them as `name=value`,
    /// joined by blanks, as `modprobe` passes them. Dashes and underscores in a module's name are equivalent.
    pub(super) fn module_parameters(&self, module: &str) -> String {
        let wanted = module.replace('-', "_");
        let of_module = self.words.iter().filter_map(|word| {
            let (name, parameter) = word.trim_start_matches('"').split_once('.')?;
            (!name.contains('=') && name.replace('-', "_") == wanted).then_some(parameter)
        });
        of_module.collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_parameters_are_found() {
        let line = "quiet cube.root=/dev/vdc cube-mmio.base=0x1000 cube_mmio.count=3 \
                    x=cube_mmio.port=1 vt.s=\"a b\" cube.root=/dev/vdd -- cube.layer=no";
        let line = CommandLine::parse(line);
        assert_eq!(line.value("cube.root"), Some("/dev/vdd"));
        assert_eq!(line.value("cube.layer"), None);
        assert_eq!(line.module_parameters("cube_mmio"), "base=0x1000 count=3");
        assert_eq!(line.module_parameters("cube-mmio"), "base=0x1000 count=3");
        assert_eq!(line.module_parameters("vt"), "s=\"a b\"");
        assert_eq!(line.module_parameters("overlay"), "");
    }
}
