/* SPDX-License-Identifier: Apache-2.0 */
void _start(void);
void _start(void) { for (;;) { } }
