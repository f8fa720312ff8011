//! Functions compiled a second time for the host's vector instruction sets.

/// What the host can do, as far as a function is compiled for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Host {
    Any,
    /// AVX2, fused multiply-adds, conversion of halves.
    Fused,
    /// AVX-512 beside that.
    Wide,
}

/// A function that is compiled for every [`Host`]; the last argument of its body says which it is.
macro_rules! compiled_thrice {
    ($(#[$doc:meta])* $vis:vis fn $name:ident = $body:ident($($arg:ident: $kind:ty),*) $(-> $out:ty)?) => {
        $(#[$doc])*
        $vis fn $name($($arg: $kind),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::is_x86_feature_detected as has;
                #[target_feature(enable = "avx2,fma,f16c")]
                fn fused($($arg: $kind),*) $(-> $out)? {
                    $body($($arg,)* $crate::host::Host::Fused)
                }
                #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
                fn wide($($arg: $kind),*) $(-> $out)? {
                    $body($($arg,)* $crate::host::Host::Wide)
                }
                if has!("avx2") && has!("fma") && has!("f16c") {
                    if has!("avx512f") && has!("avx512vl") && has!("avx512dq") && has!("avx512bw") {
                        // SAFETY: all features the function is compiled for were just found on this processor.
                        return unsafe { wide($($arg),*) };
                    }
                    // SAFETY: all features the function is compiled for were just found on this processor.
                    return unsafe { fused($($arg),*) };
                }
            }
            $body($($arg,)* $crate::host::Host::Any)
        }
    };
}

pub(crate) use compiled_thrice;
