//! Enums whose values have a word each.

/// Defines an enum of values without fields, with `ALL`, every value in order, and `label`, the word of a value.
#[macro_export]
macro_rules! labelled {
    (
        $(#[$of_enum:meta])*
        $vis:vis enum $name:ident {
            $($(#[$of_value:meta])* $value:ident => $label:literal,)+
        }
    ) => {
        $(#[$of_enum])*
        $vis enum $name {
            $($(#[$of_value])* $value,)+
        }

        impl $name {
            /// Every value, in the order of the definition.
            $vis const ALL: [Self; [$($label),+].len()] = [$(Self::$value),+];

            /// The word of the value in metrics, logs, messages and responses.
            #[must_use]
            $vis const fn label(self) -> &'static str {
                match self {
                    $(Self::$value => $label,)+
                }
            }
        }
    };
}
