//! How the running program is started again, to compile in another process or to run under a tool.

use std::{env, ffi::OsString, path::PathBuf, process::Command, sync::OnceLock};

use crate::{Error, Result};

static DECLARED: OnceLock<Program> = OnceLock::new();

/// What starts a program: its file, and the arguments that come before its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The file to run.
    pub path: PathBuf,
    /// What an interpreter needs to find the program, such as `-m evosdpa`.
    pub arguments: Vec<OsString>,
}

impl Program {
    /// Says how this program is started when its process is an interpreter's; the first declaration counts.
    pub fn declare(path: PathBuf, arguments: Vec<OsString>) {
        let _ = DECLARED.set(Self { path, arguments });
    }

    /// The running program: as declared, or the process's own file.
    pub fn running() -> Result<Self> {
        if let Some(declared) = DECLARED.get() {
            return Ok(declared.clone());
        }
        let path = env::current_exe()
            .map_err(|source| Error::Io { path: PathBuf::from("the running program"), source })?;
        Ok(Self { path, arguments: Vec::new() })
    }

    /// All that follows the file on a command line: what starts the program, then its own arguments.
    pub fn arguments_before(&self, own: Vec<OsString>) -> Vec<OsString> {
        self.arguments.iter().cloned().chain(own).collect()
    }

    /// A command that starts it; the program's own arguments are still to be added.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.args(&self.arguments);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declared_program_takes_the_place_of_the_file() {
        assert_eq!(Program::running().unwrap().path, env::current_exe().unwrap());
        Program::declare(PathBuf::from("python3"), vec!["-m".into(), "evosdpa".into()]);
        Program::declare(PathBuf::from("another"), Vec::new());
        let command = Program::running().unwrap().command();
        assert_eq!(command.get_program(), "python3");
        assert_eq!(command.get_args().collect::<Vec<_>>(), ["-m", "evosdpa"]);
    }
}
